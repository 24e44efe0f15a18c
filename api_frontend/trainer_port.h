/*
 * trainer_port.h: the RL calls for trainers over one ROUTER socket; the same names, fields and
 * handlers as HTTP (routes.def).
 *
 * A call is two frames: a call id of 8 bytes (little-endian u64, the caller's choice) and a
 * MessagePack map {"call": name, fields...}; "idempotency_key" and "admin_key" are fields too. All
 * others may come as one, "json": the text of an HTTP body, which goes on to the ranks as it is.
 * The reply is the same id and a map {"status": HTTP code, fields...} with the fields of the HTTP
 * reply; with an error "error" is the map {"message", "type", "param", "code"}. Calls of one
 * trainer are answered as they end, not in order. A message without a readable id is dropped and
 * counted.
 */
#ifndef LK_API_FRONTEND_TRAINER_PORT_H
#define LK_API_FRONTEND_TRAINER_PORT_H

#include "api_frontend/api.h"
#include "base/port.h"

#define TRAINER_MAX_OPEN 1024 /* calls worked on at once; more get 503 */

typedef struct {
    api_t *api;
    lk_port_t *port; /* borrowed; NULL after fini: late replies go nowhere */
    size_t n_open;
    uint64_t dropped;
} trainer_port_t;

void trainer_port_init(trainer_port_t *self, api_t *api, lk_port_t *port);
/* Takes at most `budget` messages; true when there may be more. */
bool trainer_port_drain(trainer_port_t *self, size_t budget);
/* One call, as drain does it. */
void trainer_port_on_message(trainer_port_t *self, const port_peer_t *peer,
                             const port_frame_t *frames, size_t n_frames);

#endif
