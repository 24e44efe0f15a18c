/*
 * nccl_fake.h: communicators over host devices (transfer/device/device_host.h), with NCCL's
 * blocking: a collective of a rank lets its stream go on when every other rank's stream has come to
 * the same one, and never if one is missing, or brought another size. Any number of threads; one
 * per rank at a time.
 */
#ifndef LK_TESTS_NCCL_FAKE_H
#define LK_TESTS_NCCL_FAKE_H

#include "transfer/backends/nccl/nccl_comm.h"

#include <stdatomic.h>

/* What goes wrong; zeroed by nccl_fake_reset. */
typedef struct {
    atomic_uint lag;         /* polls that say INPROGRESS after each call */
    atomic_uint old_version; /* this rank + 1 has another NCCL */
    atomic_uint ending;      /* aborted communicators that don't end */
    atomic_bool torn;        /* ranks get half of the next broadcast; then false */
    atomic_bool no_library;
    atomic_uint lost; /* polls of ranks of a group with an aborted rank report a remote error */
} nccl_fake_knobs_t;

extern nccl_fake_knobs_t nccl_fake_knobs;
extern const nccl_comm_ops_t nccl_fake_ops;

/* An id that somebody else made up: ranks that bring it meet. */
void nccl_fake_know(const uint8_t id[NCCL_ID_BYTES]);
/* Forgets all groups (their communicators and streams have ended). Returns how many communicators
 * were not aborted: leaks. */
unsigned nccl_fake_reset(void);

#endif
