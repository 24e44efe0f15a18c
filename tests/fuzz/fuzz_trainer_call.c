/* Fuzz target: a trainer's message. One byte says how many bytes the id frame has; the rest is the
 * body. With an id there is exactly one reply with that id; without, the message is counted. */
#include "api_frontend/trainer_port.h"
#include "proto/limits.h"
#include "proto/wire_json.h"
#include "tests/fuzz/api_harness.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static lk_status_t from_msgpack(const void *data, size_t len, json_t **out, lk_error_t *err)
{
    static const wire_limits_t wire_limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    wire_doc_t doc = {0};
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, data, len, &wire_limits, err));
    lk_status_t status = wire_to_json(doc.root, out, err);
    wire_doc_fini(&doc);
    return status;
}

typedef struct {
    lk_port_t base;
    size_t n_replies;
    uint8_t id[8];
} fake_port_t;

static lk_status_t on_send(lk_port_t *self, const port_peer_t *peer, const port_frame_t *frames,
                           size_t n, lk_error_t *err)
{
    fake_port_t *port = (fake_port_t *)self;
    json_t *map = NULL;
    CHECK(n == 2 && frames[0].len == 8 && memcmp(frames[0].data, port->id, 8) == 0);
    CHECK(from_msgpack(frames[1].data, frames[1].len, &map, err) == LK_OK);
    CHECK(json_is_integer(json_object_get(map, "status")));
    json_decref(map);
    port->n_replies++;
    return LK_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const port_ops_t ops = {.send = on_send};
    if (size == 0) {
        return 0;
    }
    size_t id_len = LK_MIN((size_t)data[0], size - 1);
    harness_t *h = harness_new(NULL);
    fake_port_t port = {.base = {&ops}};
    trainer_port_t trainer;
    trainer_port_init(&trainer, &h->api, &port.base);
    memcpy(port.id, data + 1, LK_MIN(id_len, sizeof port.id));
    const port_peer_t peer = {.len = 1};
    const port_frame_t frames[2] = {{data + 1, id_len}, {data + 1 + id_len, size - 1 - id_len}};
    trainer_port_on_message(&trainer, &peer, frames, 2);
    /* a command may follow on another's answer */
    for (int i = 0; i < 4; i++) {
        harness_answer(h);
    }
    CHECK(port.n_replies == (id_len == 8) && trainer.dropped == (id_len != 8));
    CHECK(trainer.n_open == 0);
    harness_free(h);
    return 0;
}
