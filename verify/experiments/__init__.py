"""Experiments: folders with an idea each, and what puts them through the harness."""

from radixmlp.verify.experiments.files import ExperimentError, load_experiment

__all__ = ["ExperimentError", "load_experiment"]
