/*
 * net.h: messages between the processes, as bytes, over links that are in order and without gaps
 * (one ZeroMQ connection each) and take time. What ZeroMQ loses is lost here: PUB to whoever has
 * not subscribed yet or does not keep up, what goes to the address of a process that is over, and
 * what was under way when a process died: all of it to that process, and from it what it sent last.
 */
#ifndef LK_TESTS_SIM_NET_H
#define LK_TESTS_SIM_NET_H

#include "tests/sim/sim.h"

/* name, text */
#define SIM_LINK_TABLE(X)                                                                          \
    X(HANDSHAKE) /* engines, front ends <-> coordinator */                                         \
    X(HERE)      /* engine -> front end's input ROUTER */                                          \
    X(INPUT)     /* front end -> engine */                                                         \
    X(OUTPUT)    /* engine -> front end */                                                         \
    X(EVENTS)    /* engine, front end -> coordinator */                                            \
    X(STATS)     /* coordinator -> front ends, PUB */                                              \
    X(WAVE)      /* coordinator -> engines, PUB */

typedef enum {
#define X(name) SIM_LINK_##name,
    SIM_LINK_TABLE(X)
#undef X
        SIM_LINK_COUNT
} sim_link_t;

typedef struct {
    uint64_t messages, bytes;
} sim_traffic_t;

sim_net_t *sim_net_new(const sim_t *sim);
void sim_net_destroy(sim_net_t **self_p);

/* Nodes: the coordinator, then the engines by rank, then the front ends. */
static inline uint32_t sim_node_coord(void)
{
    return 0;
}
static inline uint32_t sim_node_rank(const sim_t *sim, uint32_t rank)
{
    return 1 + rank;
}
static inline uint32_t sim_node_front(const sim_t *sim, uint32_t front)
{
    return 1 + (uint32_t)sim->o.ranks + front;
}

/* A process begins at the node; `life` is its generation. Messages to the node's stable address
 * that were sent while there was none arrive now. */
void sim_net_up(sim_t *sim, uint32_t node, uint64_t life);
/* It is over. */
void sim_net_down(sim_t *sim, uint32_t node);
uint64_t sim_net_life(const sim_t *sim, uint32_t node); /* 0: none */
/* The node subscribes to the coordinator; what is published before that takes effect is lost. */
void sim_net_subscribe(sim_t *sim, uint32_t node);

/* Encodes msg, whose envelope the caller has filled, and sends it off. to_life: the process that is
 * meant, 0: whichever is at the node's address. */
void sim_net_send(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t to_life,
                  const msg_t *msg);
/* What arrives at the node over links of the mask (1 << link) stays in its sockets until it is let
 * go; then it comes at once, each connection's in order and before what arrives in that moment. */
void sim_net_hold(sim_t *sim, uint32_t node, unsigned links);
/* What is sent from now on over that connection arrives after ns at the earliest. */
void sim_net_delay(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t ns);
/* Connections between the two, a < b, break and are made anew at once: what was sent last and has
 * not been read is lost. */
void sim_net_break(sim_t *sim, uint32_t a, uint32_t b);
/* A MESSAGE event: decodes and hands it to its node. */
void sim_net_deliver(sim_t *sim, sim_event_t *event);
const sim_traffic_t *sim_net_traffic(const sim_t *sim, sim_link_t link);

#endif
