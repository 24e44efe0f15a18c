/* guards.h: what a rank of the models does next in a recorded state, against the real group_next.
 */
#ifndef LK_TESTS_MODEL_GUARDS_H
#define LK_TESTS_MODEL_GUARDS_H

#include <stdbool.h>

/* A row of record.pml's record_next. False, and says so, if the code does otherwise. */
bool guards_repeat(const char *row);

#endif
