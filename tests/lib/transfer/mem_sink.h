/*
 * mem_sink.h: a weight sink over plain memory, for tests: a model of a few tensors, of which it
 * keeps the bytes as they arrive. It takes a tensor in MEM_SINK_SLICES calls, and insists that they
 * are for the same one.
 */
#ifndef LK_TESTS_MEM_SINK_H
#define LK_TESTS_MEM_SINK_H

#include "transfer/weight_sink.h"

#define MEM_SINK_MAX    512
#define MEM_SINK_SLICES 3

typedef struct {
    tensor_desc_t model[MEM_SINK_MAX]; /* names borrowed */
    uint8_t *data[MEM_SINK_MAX];       /* sized exactly, so that a sanitizer sees an overrun */
    uint64_t bytes[MEM_SINK_MAX];
    bool arrived[MEM_SINK_MAX];
    size_t n_model;
    size_t plan[MEM_SINK_MAX]; /* index into model */
    size_t n_plan;
    bool under_way; /* tensor `at` of the plan was handed over, `slices` of it are done */
    size_t at, slices;
    bool two_sets;       /* its session's bytes are in no set in force until the commit */
    size_t prepares;     /* calls of prepare that are INPROGRESS from here on */
    bool direct;         /* offer places to receive into */
    const char *fail_at; /* tensor() of this name fails */
    size_t begins, commits, tensors;
    lk_status_t commit_status;
    device_t *device; /* set: a sink in the memory of this (host) device */
} mem_sink_t;

mem_sink_t *mem_sink_new(const tensor_desc_t *model, size_t n);
void mem_sink_destroy(mem_sink_t **self_p);
weight_sink_t mem_sink(mem_sink_t *self);

#endif
