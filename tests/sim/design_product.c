#include "tests/sim/design.h"

const bool sim_design_frontend_pause = false;
