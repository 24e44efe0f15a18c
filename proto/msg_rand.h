/* msg_rand.h: random messages, for tests, fuzzing seeds and the simulator's garbage. */
#ifndef LK_PROTO_MSG_RAND_H
#define LK_PROTO_MSG_RAND_H

#include "base/prng.h"
#include "proto/messages.h"

/* Any of messages.def's types. */
msg_type_t msg_rand_type(lk_prng_t *prng);
/* Every field random: small and boundary numbers, empty and long strings of valid UTF-8, empty and
 * longer lists. The caller owns *out (msg_fini). Stops the process when out of memory. */
void msg_rand(lk_prng_t *prng, msg_type_t type, msg_t *out);

#endif
