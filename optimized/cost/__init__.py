"""Which attention `"auto"` runs a batch with: predicted from its plan and a short calibration on the device."""

from radixmlp.optimized.cost.choice import Choice, choose_attention, fixed_rule, use_cost_model
from radixmlp.optimized.cost.model import CostModel
from radixmlp.optimized.cost.work import Work, work_of

__all__ = ["Choice", "CostModel", "Work", "choose_attention", "fixed_rule", "use_cost_model", "work_of"]
