/* Ports in memory: one thread, no waiting. A message is delivered in the call that sends it, or
 * kept by a connecting port until somebody binds its address, as ZeroMQ does. */
#include "base/check.h"
#include "base/port.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct mem_msg {
    struct mem_msg *next;
    port_peer_t from;
    size_t n;
    port_frame_t frames[PORT_MAX_FRAMES]; /* into data */
    uint8_t data[];
} mem_msg_t;

typedef struct {
    mem_msg_t *head, **tail;
} queue_t;

typedef struct port_mem {
    lk_port_t base;
    port_mem_hub_t *hub;
    struct port_mem *next; /* in the hub, newest first */
    port_kind_t kind;
    bool bind;
    char address[256];
    port_peer_t id;
    queue_t inbox;
    queue_t unsent; /* of a connecting port whose address nobody has bound yet */
    uint64_t sent;  /* messages, for taking turns */
} port_mem_t;

struct port_mem_hub {
    port_mem_t *ports;
    uint64_t next_id;
};

static void queue_init(queue_t *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static void queue_push(queue_t *q, mem_msg_t *msg)
{
    msg->next = NULL;
    *q->tail = msg;
    q->tail = &msg->next;
}

static mem_msg_t *queue_pop(queue_t *q)
{
    mem_msg_t *msg = q->head;
    if (msg != NULL) {
        q->head = msg->next;
        if (q->head == NULL) {
            q->tail = &q->head;
        }
    }
    return msg;
}

static void queue_fini(queue_t *q)
{
    for (mem_msg_t *msg = queue_pop(q); msg != NULL; msg = queue_pop(q)) {
        free(msg);
    }
}

static const port_kind_t partner[] = {
    [PORT_ROUTER] = PORT_DEALER, [PORT_DEALER] = PORT_ROUTER, [PORT_PUSH] = PORT_PULL,
    [PORT_PULL] = PORT_PUSH,     [PORT_PUB] = PORT_SUB,       [PORT_SUB] = PORT_PUB,
};

static bool linked(const port_mem_t *a, const port_mem_t *b)
{
    return a->bind != b->bind && partner[a->kind] == b->kind && strcmp(a->address, b->address) == 0;
}

static bool same_peer(const port_peer_t *a, const port_peer_t *b)
{
    return a->len == b->len && memcmp(a->id, b->id, a->len) == 0;
}

/* Number `turn` (modulo their number) of the ports that self is linked to, oldest first; or NULL.
 */
static port_mem_t *linked_port(const port_mem_t *self, uint64_t turn)
{
    size_t count = 0;
    for (port_mem_t *p = self->hub->ports; p != NULL; p = p->next) {
        count += linked(self, p);
    }
    size_t skip = count > 0 ? count - 1 - turn % count : 0;
    for (port_mem_t *p = self->hub->ports; p != NULL; p = p->next) {
        if (linked(self, p) && skip-- == 0) {
            return p;
        }
    }
    return NULL;
}

static mem_msg_t *msg_new(const port_mem_t *from, const port_frame_t *frames, size_t n)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        total += frames[i].len;
    }
    mem_msg_t *msg = malloc(sizeof *msg + total);
    CHECKF(msg != NULL, "out of memory");
    uint8_t *p = msg->data;
    msg->from = from->id;
    msg->n = n;
    for (size_t i = 0; i < n; i++) {
        if (frames[i].len > 0) {
            memcpy(p, frames[i].data, frames[i].len);
        }
        msg->frames[i] = (port_frame_t){p, frames[i].len};
        p += frames[i].len;
    }
    return msg;
}

static lk_status_t mem_send(lk_port_t *port, const port_peer_t *peer, const port_frame_t *frames,
                            size_t n, lk_error_t *err)
{
    port_mem_t *self = (port_mem_t *)port;
    CHECK(n > 0 && n <= PORT_MAX_FRAMES);
    CHECK(self->kind != PORT_PULL && self->kind != PORT_SUB);
    CHECK(self->kind != PORT_ROUTER || peer != NULL);
    for (size_t i = 0; i < n; i++) {
        if (frames[i].len > PORT_MAX_MESSAGE) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "%s: frame %zu of %zu bytes", self->address,
                                i, frames[i].len);
        }
    }
    if (self->kind == PORT_PUB) {
        for (port_mem_t *p = self->hub->ports; p != NULL; p = p->next) {
            if (linked(self, p)) {
                queue_push(&p->inbox, msg_new(self, frames, n));
            }
        }
        return LK_OK;
    }
    if (self->kind == PORT_ROUTER) {
        /* newest first: who reconnects under a name takes over from the old one */
        for (port_mem_t *p = self->hub->ports; p != NULL; p = p->next) {
            if (linked(self, p) && same_peer(&p->id, peer)) {
                queue_push(&p->inbox, msg_new(self, frames, n));
                return LK_OK;
            }
        }
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s: no such peer is connected",
                            self->address);
    }
    port_mem_t *to = linked_port(self, self->sent);
    if (to == NULL && self->bind) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s: no peer takes the message now",
                            self->address);
    }
    queue_push(to != NULL ? &to->inbox : &self->unsent, msg_new(self, frames, n));
    self->sent++;
    return LK_OK;
}

static lk_status_t mem_recv(lk_port_t *port, port_msg_t *out, lk_error_t *err)
{
    port_mem_t *self = (port_mem_t *)port;
    CHECK(self->kind != PORT_PUSH && self->kind != PORT_PUB);
    mem_msg_t *msg = queue_pop(&self->inbox);
    if (msg == NULL) {
        return LK_INPROGRESS;
    }
    *out = (port_msg_t){.n_frames = msg->n, .owned = msg};
    memcpy(out->frames, msg->frames, sizeof msg->frames[0] * msg->n);
    if (self->kind == PORT_ROUTER) {
        out->peer = msg->from;
    }
    return LK_OK;
}

static void mem_msg_fini(port_msg_t *msg)
{
    if (msg != NULL && msg->owned != NULL) {
        free(msg->owned);
        memset(msg, 0, sizeof *msg);
    }
}

static int mem_fd(lk_port_t *port)
{
    return -1;
}

static const char *mem_address(lk_port_t *port)
{
    return ((port_mem_t *)port)->address;
}

static void mem_destroy(lk_port_t *port)
{
    port_mem_t *self = (port_mem_t *)port;
    port_mem_t **at = &self->hub->ports;
    while (*at != self) {
        at = &(*at)->next;
    }
    *at = self->next;
    queue_fini(&self->inbox);
    queue_fini(&self->unsent);
    free(self);
}

static const port_ops_t mem_ops = {mem_send, mem_recv,    mem_msg_fini,
                                   mem_fd,   mem_address, mem_destroy};

port_mem_hub_t *port_mem_hub_new(void)
{
    port_mem_hub_t *hub = calloc(1, sizeof *hub);
    CHECKF(hub != NULL, "out of memory");
    return hub;
}

void port_mem_hub_destroy(port_mem_hub_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        CHECKF((*self_p)->ports == NULL, "ports of the hub are still open");
        free(*self_p);
        *self_p = NULL;
    }
}

static bool address_taken(const port_mem_hub_t *hub, const char *address)
{
    for (const port_mem_t *p = hub->ports; p != NULL; p = p->next) {
        if (p->bind && strcmp(p->address, address) == 0) {
            return true;
        }
    }
    return false;
}

/* Queued messages of connecting ports go to the port that has just come, in order. */
static void take_unsent(port_mem_t *self)
{
    for (port_mem_t *p = self->hub->ports; p != NULL; p = p->next) {
        if (linked(self, p)) {
            for (mem_msg_t *msg = queue_pop(&p->unsent); msg != NULL; msg = queue_pop(&p->unsent)) {
                queue_push(&self->inbox, msg);
            }
        }
    }
}

lk_status_t port_mem_open(port_mem_hub_t *hub, port_kind_t kind, bool bind, const char *address,
                          const port_peer_t *identity, lk_port_t **out, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(port_check_open(address, identity, err));
    if (bind && address_taken(hub, address)) {
        return lk_error_set(err, LK_ERR_IO, "cannot bind %s: Address already in use", address);
    }
    port_mem_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for a port", address);
    }
    uint64_t id = ++hub->next_id;
    self->base.ops = &mem_ops;
    self->hub = hub;
    self->kind = kind;
    self->bind = bind;
    queue_init(&self->inbox);
    queue_init(&self->unsent);
    size_t len = strlen(address);
    bool wildcard = bind && len > 2 && strcmp(address + len - 2, ":*") == 0;
    snprintf(self->address, sizeof self->address, "%.*s", (int)(wildcard ? len - 1 : len), address);
    if (wildcard) { /* any number that no other port has */
        snprintf(self->address + len - 1, sizeof self->address - len + 1, "%llu",
                 40000ull + (unsigned long long)id);
    }
    if (identity != NULL) {
        self->id = *identity;
    } else { /* a zero byte in front, where no given identity has one */
        self->id.len = 1 + sizeof id;
        memcpy(self->id.id + 1, &id, sizeof id);
    }
    if (bind) {
        take_unsent(self);
    }
    self->next = hub->ports;
    hub->ports = self;
    *out = &self->base;
    return LK_OK;
}
