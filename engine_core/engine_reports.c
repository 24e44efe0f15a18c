/* engine_reports.c: load reports to the coordinator, and the JSON bodies of answers. */
#include "base/hash.h"
#include "engine_core/engine_internal.h"

#include <string.h>

/* ---- load ---- */

void engine_note_pause(engine_core_t *self)
{
    bool paused = pause_is_paused(group_pause(self->group));
    if (paused == self->was_paused) {
        return;
    }
    self->was_paused = paused;
    uint64_t now = engine_now(self);
    if (paused) {
        self->pauses++;
        self->paused_since_ns = now;
    } else {
        self->last_pause_ns = now - self->paused_since_ns;
        self->paused_ns += self->last_pause_ns;
    }
}

static uint64_t open_pause_ns(const engine_core_t *self)
{
    return self->was_paused ? engine_now(self) - self->paused_since_ns : 0;
}

static msg_load_t load_of(const engine_core_t *self)
{
    const weight_state_t *weights = group_weights(self->group);
    kv_cache_stats_t kv;
    kv_cache_stats(self->kv, &kv);
    wte_progress_t receiving = {0};
    if (self->updating && self->update_verb == UPDATE_VERB_UPDATE) {
        update_session_progress(self->session, &receiving);
    }
    return (msg_load_t){.rank = self->config.rank,
                        .waiting = scheduler_num_waiting(self->scheduler),
                        .running = scheduler_num_running(self->scheduler),
                        .kv_usage = (double)kv_cache_used(self->kv) / kv_cache_num_blocks(self->kv),
                        .step = self->steps,
                        .dummy_steps = self->dummy_steps,
                        .wave = group_wave(self->group),
                        .run = group_run(self->group),
                        .paused = pause_is_paused(group_pause(self->group)),
                        .paused_local = group_paused_local(self->group),
                        .gates = group_gates(self->group),
                        .weight_epoch = weights->epoch,
                        .weight_version = msg_str(weights->version),
                        .round = group_round(self->group),
                        .prefix_queries = kv.queries,
                        .prefix_hits = kv.hits,
                        .preemptions = scheduler_num_preemptions(self->scheduler),
                        .prompt_tokens = self->prompt_tokens,
                        .generation_tokens = self->generation_tokens,
                        .votes = self->votes,
                        .pauses = self->pauses,
                        .paused_ns = self->paused_ns + open_pause_ns(self),
                        .last_pause_ns =
                            self->was_paused ? open_pause_ns(self) : self->last_pause_ns,
                        .updates = self->updates,
                        .updates_failed = self->updates_failed,
                        .update_tensors = self->update_tensors,
                        .update_bytes = self->update_bytes,
                        .update_ns = self->update_ns,
                        .shadow = weights->shadow,
                        .session_open = weights->session,
                        .receiving_done = receiving.bytes_done,
                        .receiving_total = receiving.bytes_total,
                        .kv_blocks = kv_cache_num_blocks(self->kv),
                        .block_size = kv_cache_block_size(self->kv)};
}

static uint64_t load_hash(const msg_load_t *load)
{
    uint64_t words[] = {load->waiting,
                        load->running,
                        load->step,
                        load->wave,
                        load->run,
                        load->paused,
                        load->paused_local,
                        load->gates,
                        load->weight_epoch,
                        load->round,
                        load->preemptions,
                        load->generation_tokens,
                        load->updates,
                        load->updates_failed,
                        load->session_open,
                        load->receiving_done,
                        (uint64_t)(load->kv_usage * 1e6)};
    return lk_hash64(load->weight_version.ptr, load->weight_version.len,
                     lk_hash64(words, sizeof words, 1));
}

/* On a change, but not more often than every 100 ms; and with every heartbeat. */
bool engine_report_if_due(engine_core_t *self)
{
    uint64_t now = engine_now(self);
    msg_load_t load = load_of(self);
    uint64_t hash = load_hash(&load);
    self->report_pending = hash != self->reported_hash;
    uint64_t interval = self->report_pending ? REPORT_INTERVAL_NS : self->config.heartbeat_ns;
    /* New weights are reported at once: the coordinator's word on the newest there ever were is all
     * that is left of them when every rank dies. */
    bool renewed = load.weight_epoch != self->reported_epoch;
    if (self->reported_hash != 0 && !renewed && now - self->reported_ns < interval) {
        return false;
    }
    if (self->reported_hash == 0 || now - self->heartbeat_ns >= self->config.heartbeat_ns) {
        msg_t heartbeat = {.type = MSG_HEARTBEAT};
        heartbeat.heartbeat = (msg_heartbeat_t){MSG_ROLE_ENGINE, self->config.rank};
        self->config.host.to_coordinator(self->config.host.ctx, &heartbeat);
        for (uint32_t f = 0; f < self->config.n_frontends; f++) {
            self->config.host.to_frontend(self->config.host.ctx, f, &heartbeat);
        }
        self->heartbeat_ns = now;
    }
    msg_t msg = {.type = MSG_LOAD};
    msg.load_report.load = load;
    self->config.host.to_coordinator(self->config.host.ctx, &msg);
    self->reported_ns = now;
    self->reported_hash = hash;
    self->reported_epoch = load.weight_epoch;
    self->report_pending = false;
    return true;
}

void engine_announce_silence(engine_core_t *self, bool begins)
{
    const engine_host_t *host = &self->config.host;
    msg_t msg = {.type = MSG_HEARTBEAT};
    msg.heartbeat = (msg_heartbeat_t){MSG_ROLE_ENGINE, self->config.rank,
                                      begins ? self->config.transfer_timeout_ns / LK_MS_NS : 0};
    host->to_coordinator(host->ctx, &msg);
    if (host->patience != NULL) {
        host->patience(host->ctx, begins);
    }
    self->heartbeat_ns = engine_now(self);
}

/* ---- JSON ---- */

static msg_str_t finish_text(engine_core_t *self)
{
    const char *text = lk_buf_cstr(&self->text);
    return (msg_str_t){text, self->text.len};
}

static void add_text(engine_core_t *self, const char *key, const char *text)
{
    lk_buf_printf(&self->text, ", \"%s\": ", key);
    lk_buf_json_str(&self->text, text, strlen(text));
}

static void add_digest(engine_core_t *self)
{
    char hex[DIGEST_HEX_SIZE];
    digest_hex(self->sink.ops->digest(self->sink.ctx), hex);
    add_text(self, "digest", hex);
}

/* What the transfer engine says of itself: numbers and texts. */
static void engine_body(engine_core_t *self)
{
    json_t *said = json_object(); /* NULL: out of memory, and then nothing is said */
    update_session_describe(self->session, said);
    const char *key;
    json_t *value;
    json_object_foreach(said, key, value)
    {
        if (json_is_string(value)) {
            add_text(self, key, json_string_value(value));
        } else {
            lk_buf_printf(&self->text, ", \"%s\": %lld", key, (long long)json_integer_value(value));
        }
    }
    json_decref(said);
}

static void init_body(engine_core_t *self)
{
    const model_config_t *m = self->config.model;
    lk_dtype_t dtype =
        weight_table_dtype(self->config.executor->ops->weights(self->config.executor));
    bool digests = !digest_equal(self->sink.ops->digest(self->sink.ctx), (digest_t){{0}});
    lk_buf_printf(&self->text, ", \"weight_digests\": %s", digests ? "true" : "false");
    lk_buf_printf(&self->text,
                  ", \"storage_dtype\": \"%s\", \"model\": {\"num_layers\": %u, "
                  "\"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"head_dim\": %u, "
                  "\"num_experts\": %u, \"tied\": %s}",
                  dtype_torch_name(dtype), m->num_layers, m->num_heads, m->num_kv_heads,
                  m->head_dim, m->num_experts, m->tie_word_embeddings ? "true" : "false");
    engine_body(self);
}

static void update_body(engine_core_t *self, update_verb_t verb)
{
    const weight_state_t *weights = group_weights(self->group);
    switch (verb) {
    case UPDATE_VERB_INIT:
        init_body(self);
        break;
    case UPDATE_VERB_UPDATE:
        lk_buf_printf(&self->text, ", \"tensors\": %llu, \"bytes\": %llu, \"seconds\": %.6f",
                      (unsigned long long)self->update_last.tensors_done,
                      (unsigned long long)self->update_last.bytes_done, self->update_seconds);
        engine_body(self);
        break;
    case UPDATE_VERB_FINISH:
        lk_buf_printf(&self->text, ", \"epoch\": %llu", (unsigned long long)weights->epoch);
        add_text(self, "version", weights->version);
        add_digest(self);
        break;
    case UPDATE_VERB_SET_VERSION:
        lk_buf_printf(&self->text, ", \"epoch\": %llu", (unsigned long long)weights->epoch);
        add_text(self, "version", weights->version);
        break;
    case UPDATE_VERB_ABORT:
        lk_buf_printf(&self->text, ", \"dirty\": %s",
                      group_gates(self->group) & GATE_DIRTY ? "true" : "false");
        break;
    case UPDATE_VERB_START:
        break;
    }
}

msg_str_t engine_done_body(engine_core_t *self, const group_action_t *done)
{
    if (done->status != LK_OK) {
        return msg_str("");
    }
    lk_buf_clear(&self->text);
    lk_buf_printf(&self->text, "{\"rank\": %u", self->config.rank);
    if (done->kind == CMD_PAUSE) {
        lk_buf_printf(&self->text, ", \"steps\": %llu", (unsigned long long)self->steps);
    } else if (done->kind == CMD_UPDATE) {
        update_body(self, (update_verb_t)done->verb);
    }
    lk_buf_str(&self->text, "}");
    return finish_text(self);
}

static const char *weight_state_text(const engine_core_t *self)
{
    const weight_state_t *weights = group_weights(self->group);
    unsigned gates = group_gates(self->group);
    if (group_updating(self->group)) {
        return self->update_verb == UPDATE_VERB_INIT     ? "initialising"
               : !weights->shadow                        ? "updating"
               : self->update_verb == UPDATE_VERB_UPDATE ? "receiving"
                                                         : "preparing";
    }
    if (self->left) {
        return "outside a group";
    }
    return gates & GATE_SESSION  ? "session open"
           : gates & GATE_DIRTY  ? "dirty"
           : gates & GATE_ASLEEP ? "asleep"
                                 : "ready";
}

/* Decision 9. */
msg_str_t engine_weight_info(engine_core_t *self)
{
    const weight_state_t *weights = group_weights(self->group);
    const group_held_t *held = group_held(self->group);
    const char *closed = group_closed_why(self->group);
    wte_progress_t progress = self->update_last;
    uint64_t since_ms = 0;
    if (self->updating) {
        update_session_progress(self->session, &progress);
        since_ms = (engine_now(self) - self->update_since_ns) / LK_MS_NS;
    }
    lk_buf_clear(&self->text);
    lk_buf_printf(&self->text, "{\"rank\": %u", self->config.rank);
    add_text(self, "state", weight_state_text(self));
    add_text(self, "version", held->version);
    lk_buf_printf(&self->text, ", \"epoch\": %llu", (unsigned long long)held->epoch);
    add_digest(self);
    lk_buf_printf(&self->text, ", \"weight_swap\": \"%s\", \"session_open\": %s",
                  weights->shadow ? "shadow" : "inplace", weights->session ? "true" : "false");
    lk_buf_printf(&self->text, ", \"dirty\": %s", closed != NULL ? "true" : "false");
    if (closed != NULL) {
        add_text(self, "dirty_reason", closed);
    }
    lk_buf_printf(&self->text, ", \"update\": {\"phase\": \"%s\"",
                  update_state_name(update_session_state(self->session)));
    lk_buf_printf(
        &self->text,
        ", \"tensors_done\": %llu, \"tensors_total\": %llu, \"bytes_done\": %llu, "
        "\"bytes_total\": %llu",
        (unsigned long long)progress.tensors_done, (unsigned long long)progress.tensors_total,
        (unsigned long long)progress.bytes_done, (unsigned long long)progress.bytes_total);
    add_text(self, "waiting_for", progress.waiting_for);
    lk_buf_printf(&self->text, ", \"since_ms\": %llu}}", (unsigned long long)since_ms);
    return finish_text(self);
}

msg_str_t engine_status_body(engine_core_t *self)
{
    msg_load_t load = load_of(self);
    const pause_t *pause = group_pause(self->group);
    lk_buf_clear(&self->text);
    lk_buf_printf(&self->text,
                  "{\"rank\": %u, \"dp_size\": %u, \"members\": %u, \"place\": %u, \"lockstep\": "
                  "%s, \"group_epoch\": %llu, "
                  "\"steps\": %llu, \"dummy_steps\": %llu, \"round\": %llu, \"wave\": %llu, "
                  "\"run\": %s, \"paused\": %s, \"pause_state\": \"%s\", \"pause_epoch\": %llu, "
                  "\"paused_local\": %s, \"waiting\": %llu, \"running\": %llu, "
                  "\"kv_blocks_used\": %u, \"kv_blocks_total\": %u",
                  self->config.rank, self->config.dp_size, self->config.roster.n,
                  self->config.roster.place, self->config.lockstep ? "true" : "false",
                  (unsigned long long)self->config.group_epoch, (unsigned long long)load.step,
                  (unsigned long long)load.dummy_steps, (unsigned long long)load.round,
                  (unsigned long long)load.wave, load.run ? "true" : "false",
                  load.paused ? "true" : "false", pause_state_name(pause->state),
                  (unsigned long long)pause->epoch, load.paused_local ? "true" : "false",
                  (unsigned long long)load.waiting, (unsigned long long)load.running,
                  kv_cache_used(self->kv), kv_cache_num_blocks(self->kv));
    lk_buf_printf(&self->text,
                  ", \"preemptions\": %llu, \"prefix_queries\": %llu, \"prefix_hits\": %llu, "
                  "\"prompt_tokens\": %llu, \"generation_tokens\": %llu, \"gates\": %llu, "
                  "\"weight_epoch\": %llu",
                  (unsigned long long)load.preemptions, (unsigned long long)load.prefix_queries,
                  (unsigned long long)load.prefix_hits, (unsigned long long)load.prompt_tokens,
                  (unsigned long long)load.generation_tokens, (unsigned long long)load.gates,
                  (unsigned long long)load.weight_epoch);
    lk_buf_printf(&self->text,
                  ", \"votes\": %llu, \"pauses\": %llu, \"paused_ns\": %llu, "
                  "\"last_pause_ns\": %llu, \"updates\": %llu, \"updates_failed\": %llu, "
                  "\"update_tensors\": %llu, \"update_bytes\": %llu, \"update_ns\": %llu",
                  (unsigned long long)load.votes, (unsigned long long)load.pauses,
                  (unsigned long long)load.paused_ns, (unsigned long long)load.last_pause_ns,
                  (unsigned long long)load.updates, (unsigned long long)load.updates_failed,
                  (unsigned long long)load.update_tensors, (unsigned long long)load.update_bytes,
                  (unsigned long long)load.update_ns);
    add_text(self, "weight_version", group_weights(self->group)->version);
    lk_buf_str(&self->text, "}");
    return finish_text(self);
}
