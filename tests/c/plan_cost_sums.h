/* plan_cost_sums.h - the cost of a call in every schedule, also in those that the library never chooses. */
#include "core/plan/plan_cost.h"

/* As sp_plan_cost_of. */
bool cost_of(sp_schedule schedule, const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out);
