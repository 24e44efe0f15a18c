/* design.h: which group protocol this program is linked with: the product's, or the old design. */
#ifndef LK_TESTS_SIM_DESIGN_H
#define LK_TESTS_SIM_DESIGN_H

#include <stdbool.h>

extern const bool sim_design_frontend_pause;

#endif
