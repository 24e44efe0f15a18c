#include "tests/sim/net.h"
#include "base/check.h"
#include "base/hash.h"
#include "proto/codec.h"
#include "tests/sim/checkers.h"
#include "tests/sim/scene.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    sim_link_t link;
    uint64_t from_life, to_life, sent_ns;
    size_t envelope_len, len;
    bool lost;
    uint8_t data[];
} packet_t;

typedef struct {
    uint64_t life;          /* 0: no process */
    uint64_t over, over_ns; /* the last life that ended, and when */
    uint64_t cut_ns;        /* of what that life sent, only what is older arrives */
    uint64_t subscribed_ns;
} place_t;

/* What waits in the sockets of a node that does not read. */
typedef struct {
    unsigned links;
    sim_event_t *events;
    size_t n, cap;
} held_t;

struct sim_net {
    size_t nodes;
    held_t *held;      /* [nodes] */
    place_t *places;   /* [nodes] */
    uint64_t *last_ns; /* [link][from][to]: when the newest message arrives */
    lk_buf_t envelope, body;
    sim_traffic_t traffic[SIM_LINK_COUNT];
};

static const char *const link_names[] = {
#define X(name) #name,
    SIM_LINK_TABLE(X)
#undef X
};

sim_net_t *sim_net_new(const sim_t *sim)
{
    sim_net_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->nodes = 1 + sim->o.ranks + sim->o.frontends;
    self->last_ns = calloc(SIM_LINK_COUNT * self->nodes * self->nodes, sizeof *self->last_ns);
    self->held = calloc(self->nodes, sizeof *self->held);
    self->places = calloc(self->nodes, sizeof *self->places);
    CHECK(self->last_ns != NULL && self->held != NULL && self->places != NULL);
    lk_buf_init(&self->envelope, 0);
    lk_buf_init(&self->body, 0);
    return self;
}

void sim_net_destroy(sim_net_t **self_p)
{
    sim_net_t *self = *self_p;
    if (self != NULL) {
        lk_buf_fini(&self->envelope);
        lk_buf_fini(&self->body);
        for (size_t i = 0; i < self->nodes; i++) {
            for (size_t k = 0; k < self->held[i].n; k++) {
                free(self->held[i].events[k].data);
            }
            free(self->held[i].events);
        }
        free(self->held);
        free(self->places);
        free(self->last_ns);
        free(self);
        *self_p = NULL;
    }
}

static bool is_lost(sim_t *sim, sim_link_t link)
{
    uint64_t percent = link == SIM_LINK_WAVE    ? sim->o.lost_starts
                       : link == SIM_LINK_STATS ? sim->o.lost_stats
                                                : 0;
    /* a front end that never hears that the cluster serves could not even start */
    bool lossy = sim->phase == SIM_SAFETY || (link == SIM_LINK_WAVE && sim->phase == SIM_HEAL);
    return lossy && percent > 0 && sim_chance(sim, percent);
}

static bool is_published(sim_link_t link)
{
    return link == SIM_LINK_WAVE || link == SIM_LINK_STATS;
}

void sim_net_up(sim_t *sim, uint32_t node, uint64_t life)
{
    sim->net->places[node].life = life;
    sim_net_hold(sim, node, 0);
    for (uint32_t n = 1; node == sim_node_coord() && n < sim->net->nodes; n++) {
        sim_net_subscribe(sim, n); /* by itself, when its socket has connected again */
    }
}

/* What the dead process sent last is lost with its send queue. */
void sim_net_down(sim_t *sim, uint32_t node)
{
    place_t *p = &sim->net->places[node];
    uint64_t back = sim_chance(sim, 50) ? 0 : sim_below(sim, 4 * sim->o.latency_us * 1000 + 1);
    p->over = p->life;
    p->over_ns = sim->now_ns;
    p->cut_ns = sim->now_ns - back;
    p->life = 0;
    sim_net_hold(sim, node, 0); /* what it had not read is lost */
}

uint64_t sim_net_life(const sim_t *sim, uint32_t node)
{
    return sim->net->places[node].life;
}

void sim_net_subscribe(sim_t *sim, uint32_t node)
{
    sim->net->places[node].subscribed_ns = sim->now_ns + sim_below(sim, 50 * LK_MS_NS);
}

void sim_net_send(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t to_life,
                  const msg_t *msg)
{
    sim_net_t *self = sim->net;
    lk_error_t err = LK_ERROR_INIT;
    lk_buf_clear(&self->envelope);
    lk_buf_clear(&self->body);
    if (msg_encode(msg, &self->envelope, &self->body, &err) != LK_OK) {
        sim_fail(sim, "net", "a %s message could not be encoded: %s", msg_type_name(msg->type),
                 err.text);
        return;
    }
    size_t len = self->envelope.len + self->body.len;
    self->traffic[link].messages++;
    self->traffic[link].bytes += len;
    sim_saw(sim, &(sim_saw_t){.kind = SIM_SAW_SENT, .from = from, .to = to, .msg = msg});
    if (is_lost(sim, link) || sim_scene_loses(sim, from, to, msg) ||
        (is_published(link) && sim->now_ns < self->places[to].subscribed_ns)) {
        return;
    }
    packet_t *packet = malloc(sizeof *packet + len);
    CHECK(packet != NULL);
    *packet = (packet_t){.link = link,
                         .from_life = self->places[from].life,
                         .to_life = to_life,
                         .sent_ns = sim->now_ns,
                         .envelope_len = self->envelope.len,
                         .len = len};
    memcpy(packet->data, self->envelope.data, self->envelope.len);
    memcpy(packet->data + self->envelope.len, self->body.data, self->body.len);
    uint64_t *last = &self->last_ns[(link * self->nodes + from) * self->nodes + to];
    uint64_t at = sim->now_ns + sim_latency_ns(sim);
    at = LK_MAX(at, *last);
    *last = at;
    sim_post(sim, at - sim->now_ns, SIM_EV_MESSAGE, from, to, msg->type, packet);
}

void sim_net_delay(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t ns)
{
    uint64_t *last = &sim->net->last_ns[(link * sim->net->nodes + from) * sim->net->nodes + to];
    *last = LK_MAX(*last, sim->now_ns + ns);
}

void sim_net_hold(sim_t *sim, uint32_t node, unsigned links)
{
    held_t *held = &sim->net->held[node];
    held->links = links;
    size_t kept = 0;
    for (size_t i = 0; i < held->n; i++) {
        const sim_event_t *e = &held->events[i];
        if (links >> ((const packet_t *)e->data)->link & 1) {
            held->events[kept++] = *e;
        } else {
            sim_post_again(sim, e);
        }
    }
    held->n = kept;
}

static void keep(held_t *held, sim_event_t *event)
{
    if (held->n == held->cap) {
        held->cap = 2 * held->cap + 16;
        held->events = realloc(held->events, held->cap * sizeof *held->events);
        CHECK(held->events != NULL);
    }
    held->events[held->n++] = *event;
    event->data = NULL;
}

/* ---- broken connections ---- */

/* Links that share a connection, each in its direction. */
static const unsigned connections[] = {
    1u << SIM_LINK_HANDSHAKE, 1u << SIM_LINK_HERE | 1u << SIM_LINK_INPUT,
    1u << SIM_LINK_OUTPUT,    1u << SIM_LINK_EVENTS,
    1u << SIM_LINK_STATS,     1u << SIM_LINK_WAVE,
};

static uint32_t lose_since(sim_event_t *events, size_t n, uint32_t a, uint32_t b, unsigned links,
                           uint64_t since_ns)
{
    uint32_t lost = 0;
    for (size_t i = 0; i < n; i++) {
        const sim_event_t *e = &events[i];
        bool between = (e->a == a && e->b == b) || (e->a == b && e->b == a);
        if (e->kind == SIM_EV_MESSAGE && between) {
            packet_t *packet = e->data;
            if (links >> packet->link & 1 && packet->sent_ns > since_ns && !packet->lost) {
                packet->lost = true;
                lost++;
            }
        }
    }
    return lost;
}

void sim_net_break(sim_t *sim, uint32_t a, uint32_t b)
{
    sim_net_t *self = sim->net;
    uint32_t lost = 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(connections); i++) {
        if (sim_chance(sim, 50)) {
            uint64_t back = sim_below(sim, 4 * sim->o.latency_us * 1000 + 1);
            uint64_t since_ns = sim->now_ns - LK_MIN(back, sim->now_ns);
            lost += lose_since(sim->heap, sim->heap_n, a, b, connections[i], since_ns);
            lost +=
                lose_since(self->held[a].events, self->held[a].n, a, b, connections[i], since_ns);
            lost +=
                lose_since(self->held[b].events, self->held[b].n, a, b, connections[i], since_ns);
        }
    }
    if (a == sim_node_coord()) {
        sim_net_subscribe(sim, b);
    }
    sim_log(sim, "connections of nodes %u and %u break: %u messages are lost", a, b, lost);
}

/* Canaries: all ranks hear of another pause than the one that was asked for. */
static void change_pause(const sim_t *sim, msg_cmd_t *cmd)
{
    if (sim->config.canary == SIM_CANARY_KEEP_ABORTS && cmd->mode == PAUSE_KEEP) {
        cmd->mode = PAUSE_ABORT;
    } else if (sim->config.canary == SIM_CANARY_ABORT_KEEPS && cmd->mode == PAUSE_ABORT) {
        cmd->mode = PAUSE_KEEP;
    } else if (sim->config.canary == SIM_CANARY_WAIT_KEEPS && cmd->mode == PAUSE_WAIT) {
        cmd->mode = PAUSE_KEEP;
    } else if (sim->config.canary == SIM_CANARY_STALE_KV) {
        cmd->clear_cache = false;
    }
}

/* Lost with a process at one of the two ends. */
static bool is_cut(const sim_net_t *self, const packet_t *packet, uint32_t from, uint32_t to)
{
    const place_t *f = &self->places[from], *t = &self->places[to];
    bool lost_there = packet->to_life != 0 ? packet->to_life != t->life
                                           : t->over != 0 && packet->sent_ns <= t->over_ns;
    return packet->lost || lost_there ||
           (packet->from_life == f->over && packet->sent_ns > f->cut_ns);
}

void sim_net_deliver(sim_t *sim, sim_event_t *event)
{
    const packet_t *packet = event->data;
    uint32_t to = event->b;
    if (is_cut(sim->net, packet, event->a, to)) {
        return;
    }
    if (sim->net->places[to].life == 0 || sim->net->held[to].links >> packet->link & 1) {
        keep(&sim->net->held[to], event);
        return;
    }
    sim_trace(sim, lk_hash64(packet->data, packet->len, packet->link));
    lk_error_t err = LK_ERROR_INIT;
    msg_t msg;
    if (msg_decode(packet->data, packet->envelope_len, packet->data + packet->envelope_len,
                   packet->len - packet->envelope_len, &msg, &err) != LK_OK) {
        sim_fail(sim, "net", "a message can not be decoded: %s", err.text);
        return;
    }
    if (msg.type == MSG_OUTPUTS && msg.outputs.outputs.items[0].token_ids.len > 0 &&
        sim_plants(sim, SIM_CANARY_WRONG_TOKEN)) {
        *(uint8_t *)(uintptr_t)msg.outputs.outputs.items[0].token_ids.data ^= 1;
    }
    if (msg.type == MSG_CMD && msg.cmd.kind == CMD_PAUSE) {
        change_pause(sim, &msg.cmd);
    }
    if (sim->config.canary == SIM_CANARY_UNNUMBERED && packet->link == SIM_LINK_INPUT) {
        msg.sequence = 0;
    }
    sim_log(sim, "node %u -> %u  %-9s %s", event->a, to, link_names[packet->link],
            msg_type_name(msg.type));
    if (to == sim_node_coord()) {
        sim_coord_on_msg(&sim->coord, &msg);
    } else if (to <= sim->o.ranks) {
        sim_rank_on_msg(&sim->ranks[to - 1], event->a, &msg);
    } else {
        sim_front_on_msg(&sim->fronts[to - 1 - sim->o.ranks], &msg);
    }
    msg_fini(&msg);
}

const sim_traffic_t *sim_net_traffic(const sim_t *sim, sim_link_t link)
{
    return &sim->net->traffic[link];
}
