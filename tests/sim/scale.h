/* scale.h: what votes, waves and pauses cost as ranks are added, and the coordinator per message.
 */
#ifndef LK_TESTS_SIM_SCALE_H
#define LK_TESTS_SIM_SCALE_H

/* Prints two tables. Returns the number of runs that failed. */
int sim_scale_run(void);

#endif
