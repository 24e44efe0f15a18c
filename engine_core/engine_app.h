/*
 * engine_app.h: the inside of engine_io.h, for its two files: engine_io.c (the loop around the
 * core) and engine_enrol.c (the handshake, and what enrol.h asks for).
 */
#ifndef LK_ENGINE_CORE_ENGINE_APP_H
#define LK_ENGINE_CORE_ENGINE_APP_H

#include "base/config.h"
#include "base/loop.h"
#include "engine_core/dp/enrol.h"
#include "engine_core/dp/mesh.h"
#include "engine_core/engine_core.h"
#include "engine_core/engine_link.h"
#include "engine_core/engine_setup.h"

typedef struct {
    const lk_config_t *config;
    lk_loop_t *loop;
    const lk_env_t *env;
    uint32_t rank, n_frontends;
    port_peer_t identity;
    engine_setup_t setup;
    mesh_t *mesh;
    enrol_t enrol;
    engine_link_t handshake, events, wave;
    engine_link_t *inputs, *outputs; /* [n_frontends] */
    engine_link_scratch_t scratch;
    roster_t roster;     /* of the newest INIT that was followed; before: every rank */
    roster_t opened;     /* the executor is open for its place and n */
    engine_core_t *core; /* NULL until the first group epoch */
    uint64_t start_deadline_ns, beat_ns;
    int *status_fd;
    msg_t init;       /* the newest; zeroed: none */
    lk_error_t ended; /* why the coordinator, or the start, ends this process */
} engine_app_t;

/* Opens the handshake and says HELLO. */
LK_MUST_USE lk_status_t engine_enrol_start(engine_app_t *app, lk_error_t *err);
/* Takes what the coordinator says, looks at the mesh and at the clock. True if anything came. */
bool engine_enrol_turn(engine_app_t *app);
/* A message of the wave socket that is not the core's. */
void engine_enrol_on_rollcall(engine_app_t *app);
void engine_enrol_fini(engine_app_t *app);

/* engine_io.c */
/* Opens the executor for the roster. */
LK_MUST_USE lk_status_t engine_app_open_executor(engine_app_t *app, lk_error_t *err);
LK_MUST_USE lk_status_t engine_app_make_core(engine_app_t *app, bool rejoin, lk_error_t *err);

#endif
