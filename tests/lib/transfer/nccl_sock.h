/*
 * nccl_sock.h: communicators between processes, over host devices, with NCCL's blocking: a
 * collective of a rank lets its stream go on when every other rank's stream has come to the same
 * one, and never if one is missing: a rank that died takes all others' streams along until they
 * abort. Each rank has a connection to rank 0 (AF_UNIX, an abstract name made of the id).
 */
#ifndef LK_TESTS_NCCL_SOCK_H
#define LK_TESTS_NCCL_SOCK_H

#include "transfer/backends/nccl/nccl_comm.h"

extern const nccl_comm_ops_t nccl_sock_ops;

#endif
