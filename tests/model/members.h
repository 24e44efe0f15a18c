/* members.h: decisions of the models' coordinator against the real one. */
#ifndef LK_TESTS_MODEL_MEMBERS_H
#define LK_TESTS_MODEL_MEMBERS_H

#include <stdbool.h>

/* A row of members.pml. False, and says so, if coordinator/membership.h decides otherwise. */
bool members_repeat(const char *row);

#endif
