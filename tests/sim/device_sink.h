/*
 * device_sink.h: a rank's weights as if they lay in the memory of a device: its own sink, behind
 * the streams of a host device. What a stream has not come to is not in the sink.
 */
#ifndef LK_TESTS_SIM_DEVICE_SINK_H
#define LK_TESTS_SIM_DEVICE_SINK_H

#include "transfer/weight_sink.h"

typedef struct sim_device_sink sim_device_sink_t;

sim_device_sink_t *sim_device_sink_new(weight_sink_t inner);
/* Accepts NULL. All streams of its device have ended. */
void sim_device_sink_destroy(sim_device_sink_t **self_p);
weight_sink_t sim_device_sink(sim_device_sink_t *self);

#endif
