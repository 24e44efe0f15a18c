#include "api_frontend/cmd_stream.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROBE_NS (5 * LK_SECOND_NS) /* SEEN but no DONE: ask again, the answer may be lost */

/* One rank's answer, with its storage. */
typedef struct {
    bool done;
    lk_status_t status;
    char *text, *body;
} slot_t;

typedef struct command {
    struct command *next;
    uint64_t number; /* 0: still queued */
    cmd_desc_t desc;
    char *spec;          /* what desc.spec points to */
    engine_result_fn fn; /* NULL: nobody waits (any more) */
    void *ctx;
    uint64_t timeout_ns;
    uint64_t deadline_ns;      /* UINT64_MAX: none */
    uint64_t seen_deadline_ns; /* UPDATE: every rank must have received it by then */
    uint64_t rolled_back_ns;   /* PAUSE: from here on its caller is told so; 0: never */
    char *expired;             /* UPDATE after its deadline: the text; CANCEL_UPDATE was sent */
    uint32_t n_done;
    slot_t slots[]; /* n_ranks */
} command_t;

typedef struct {
    bool removed;
    uint64_t seen; /* every command up to here was acknowledged */
    uint64_t sent; /* and sent up to here */
    uint64_t last_send_ns;
} link_t;

struct cmd_stream {
    const engine_client_config_t *config;
    const engine_client_ops_t *ops;
    uint64_t generation, last_number, group_epoch;
    uint32_t n_members; /* ranks that are not removed */
    command_t *open;    /* numbered, oldest first */
    command_t *waiting; /* not numbered yet */
    unsigned depth;     /* callbacks may come back in; nothing is freed meanwhile */
    link_t links[];     /* n_ranks */
};

static const char *verb_name(update_verb_t verb)
{
    switch (verb) {
#define X(name, value, text)                                                                       \
    case UPDATE_VERB_##name:                                                                       \
        return text;
        UPDATE_VERB_TABLE(X)
#undef X
    }
    return "?";
}

static const char *command_name(const command_t *cmd)
{
    switch (cmd->desc.kind) {
    case CMD_PAUSE:
        return "pause";
    case CMD_RESUME:
        return "resume";
    case CMD_CANCEL:
        return "cancel";
    case CMD_UPDATE:
        return verb_name(cmd->desc.verb);
    }
    return "?";
}

cmd_stream_t *cmd_stream_new(const engine_client_config_t *config, const engine_client_ops_t *ops)
{
    cmd_stream_t *self = calloc(1, sizeof *self + config->n_ranks * sizeof self->links[0]);
    if (self != NULL) {
        self->config = config;
        self->ops = ops;
        self->generation = config->generation;
        self->n_members = config->n_ranks;
    }
    return self;
}

static void command_free(cmd_stream_t *self, command_t *cmd)
{
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        free(cmd->slots[r].text);
        free(cmd->slots[r].body);
    }
    free(cmd->expired);
    free(cmd->spec);
    free(cmd);
}

static void free_list(cmd_stream_t *self, command_t *list)
{
    while (list != NULL) {
        command_t *next = list->next;
        command_free(self, list);
        list = next;
    }
}

void cmd_stream_destroy(cmd_stream_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        free_list(*self_p, (*self_p)->open);
        free_list(*self_p, (*self_p)->waiting);
        free(*self_p);
        *self_p = NULL;
    }
}

size_t cmd_stream_num_open(const cmd_stream_t *self)
{
    size_t n = 0;
    for (const command_t *c = self->open; c != NULL; c = c->next) {
        n++;
    }
    for (const command_t *c = self->waiting; c != NULL; c = c->next) {
        n++;
    }
    return n;
}

static void append(command_t **list, command_t *cmd)
{
    while (*list != NULL) {
        list = &(*list)->next;
    }
    cmd->next = NULL;
    *list = cmd;
}

static bool everyone_saw(const cmd_stream_t *self, uint64_t number)
{
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        if (self->links[r].seen < number && !self->links[r].removed) {
            return false;
        }
    }
    return true;
}

static bool all_done(const cmd_stream_t *self, const command_t *cmd)
{
    return cmd->n_done == self->n_members;
}

/* A command is kept while a rank may need it again or an UPDATE still excludes others. */
static void sweep(cmd_stream_t *self)
{
    if (self->depth > 0) {
        return;
    }
    for (command_t **p = &self->open; *p != NULL;) {
        command_t *cmd = *p;
        bool needed = cmd->fn != NULL || !everyone_saw(self, cmd->number) ||
                      (cmd->desc.kind == CMD_UPDATE && !all_done(self, cmd));
        if (needed) {
            p = &cmd->next;
        } else {
            *p = cmd->next;
            command_free(self, cmd);
        }
    }
}

/* ---- sending ---- */

static bool send_command(cmd_stream_t *self, uint32_t rank, const command_t *cmd, bool with_spec)
{
    msg_t msg = {.type = MSG_CMD};
    msg.cmd = (msg_cmd_t){
        .client = self->config->client,
        .generation = self->generation,
        .number = cmd->number,
        .kind = cmd->desc.kind,
        .mode = cmd->desc.mode,
        .clear_cache = cmd->desc.clear_cache,
        .target = cmd->desc.target,
        .verb = cmd->desc.verb,
        .spec = with_spec ? cmd->desc.spec : (msg_str_t){NULL, 0},
        .group_epoch = self->group_epoch,
        .deadline_ns = cmd->rolled_back_ns,
    };
    return self->ops->send_engine(self->ops->ctx, rank, &msg, NULL) == LK_OK;
}

/* In order and without gaps: stops at the first that can't be queued; poll tries again. */
static void send_unsent(cmd_stream_t *self, uint32_t rank)
{
    link_t *link = &self->links[rank];
    if (link->removed) {
        return;
    }
    link->last_send_ns = lk_env_now_ns(self->ops->env);
    for (const command_t *cmd = self->open; cmd != NULL; cmd = cmd->next) {
        if (cmd->number > link->sent) {
            if (!send_command(self, rank, cmd, true)) {
                return;
            }
            link->sent = cmd->number;
        }
    }
}

static void send_again(cmd_stream_t *self, uint32_t rank)
{
    self->links[rank].sent = self->links[rank].seen;
    send_unsent(self, rank);
}

void cmd_stream_cancel_update(cmd_stream_t *self, uint64_t number, const char *why)
{
    msg_t msg = {.type = MSG_CANCEL_UPDATE};
    msg.cancel_update = (msg_cancel_update_t){
        .client = self->config->client,
        .generation = self->generation,
        .number = number,
        .why = {why, strlen(why)},
    };
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        if (self->links[r].removed) {
            continue;
        }
        /* Not queued: the probe of an expired UPDATE says it again. */
        (void)!self->ops->send_engine(self->ops->ctx, r, &msg, NULL);
    }
}

/* An unanswered UPDATE lets nothing pass, but one that the ranks carry out beside their steps only
 * keeps other UPDATEs back. */
static bool may_go(const cmd_stream_t *self, const command_t *next)
{
    for (const command_t *cmd = self->open; cmd != NULL; cmd = cmd->next) {
        if (cmd->desc.kind == CMD_UPDATE && !all_done(self, cmd) &&
            (next->desc.kind == CMD_UPDATE ||
             !update_verb_beside(cmd->desc.verb, self->config->shadow))) {
            return false;
        }
    }
    return true;
}

static uint64_t after(uint64_t now, uint64_t delta)
{
    return delta == ENGINE_CLIENT_NO_DEADLINE || now > UINT64_MAX - delta ? UINT64_MAX
                                                                          : now + delta;
}

/* The UPDATE that holds up the stream has run out of deadlines: some rank may never answer it. What
 * waits behind it must not wait for ever, too. */
static bool held_up(const cmd_stream_t *self)
{
    for (const command_t *cmd = self->open; cmd != NULL; cmd = cmd->next) {
        if (cmd->desc.kind == CMD_UPDATE && !all_done(self, cmd) && cmd->fn == NULL) {
            return true;
        }
    }
    return false;
}

static void limit_wait(cmd_stream_t *self, command_t *cmd)
{
    if (cmd->desc.kind == CMD_UPDATE && cmd->fn != NULL && held_up(self)) {
        uint64_t limit = self->config->control_timeout_ns;
        cmd->timeout_ns = LK_MIN(cmd->timeout_ns, limit);
        cmd->deadline_ns = after(lk_env_now_ns(self->ops->env), cmd->timeout_ns);
    }
}

/* Numbers and sends what may go. */
static void pump(cmd_stream_t *self)
{
    uint64_t now = lk_env_now_ns(self->ops->env);
    bool news = false;
    while (self->waiting != NULL && may_go(self, self->waiting)) {
        command_t *cmd = self->waiting;
        self->waiting = cmd->next;
        cmd->number = ++self->last_number;
        if (cmd->desc.kind == CMD_UPDATE) {
            cmd->deadline_ns = after(now, cmd->timeout_ns);
            cmd->seen_deadline_ns = after(now, self->config->control_timeout_ns);
        }
        append(&self->open, cmd);
        news = true;
    }
    if (news) {
        for (uint32_t r = 0; r < self->config->n_ranks; r++) {
            send_unsent(self, r);
        }
    }
}

/* ---- answers ---- */

static void finish(cmd_stream_t *self, command_t *cmd, lk_status_t status, const char *text)
{
    engine_result_fn fn = cmd->fn;
    if (fn == NULL) {
        return;
    }
    cmd->fn = NULL;
    uint32_t n = 0;
    engine_answer_t *answers = calloc(self->n_members, sizeof *answers);
    CHECKF(answers != NULL, "out of memory");
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        const slot_t *s = &cmd->slots[r];
        if (!self->links[r].removed) {
            answers[n++] = (engine_answer_t){r, s->done, s->status, s->text != NULL ? s->text : "",
                                             s->body != NULL ? s->body : ""};
        }
    }
    engine_result_t result = {status, text, n, answers};
    lk_buf_t merged;
    lk_buf_init(&merged, 16384);
    if (text == NULL) {
        engine_result_merge(&result, &merged);
        if (cmd->expired != NULL && result.status < 0) {
            lk_buf_t both;
            lk_buf_init(&both, 16384);
            lk_buf_printf(&both, "%s%s%s", cmd->expired, result.text[0] != '\0' ? "; " : "",
                          result.text);
            lk_buf_fini(&merged);
            merged = both;
            result.status = LK_ERR_TIMEOUT;
            result.text = lk_buf_cstr(&merged);
        }
    }
    self->depth++;
    fn(cmd->ctx, &result);
    self->depth--;
    lk_buf_fini(&merged);
    free(answers);
}

void engine_result_merge(engine_result_t *result, lk_buf_t *text)
{
    const engine_answer_t *a = result->answers;
    size_t n = result->n_answers, n_texts = 0;
    const char *first = NULL;
    bool same_status = true, same_text = true;
    for (size_t r = 0; r < n; r++) {
        same_status = same_status && a[r].status == a[0].status;
        if (a[r].text[0] != '\0') {
            n_texts++;
            first = first != NULL ? first : a[r].text;
            same_text = same_text && strcmp(a[r].text, first) == 0;
        }
    }
    result->status = a[0].status;
    if (!same_status) {
        result->status = LK_ERR_INTERNAL;
        lk_buf_str(text, "the ranks disagree about the outcome: ");
        for (size_t r = 0; r < n; r++) {
            lk_buf_printf(text, "%srank %u: %s%s%s", r > 0 ? "; " : "", a[r].rank,
                          lk_status_name(a[r].status), a[r].text[0] != '\0' ? " " : "", a[r].text);
        }
    } else if (n_texts > 0 && same_text && n_texts == n) {
        lk_buf_str(text, first);
    } else {
        for (size_t r = 0; r < n; r++) {
            if (a[r].text[0] != '\0') {
                lk_buf_printf(text, "%srank %u: %s", text->len > 0 ? "; " : "", a[r].rank,
                              a[r].text);
            }
        }
    }
    if (text->len == 0 && result->status < 0) {
        lk_buf_str(text, lk_status_name(result->status));
    }
    result->text = result->status < 0 ? lk_buf_cstr(text) : "";
}

void cmd_stream_call(cmd_stream_t *self, const cmd_desc_t *desc, uint64_t timeout_ns,
                     engine_result_fn fn, void *ctx)
{
    command_t *cmd = calloc(1, sizeof *cmd + self->config->n_ranks * sizeof cmd->slots[0]);
    CHECKF(cmd != NULL, "out of memory");
    cmd->desc = *desc;
    if (desc->spec.len > 0) {
        cmd->spec = malloc(desc->spec.len);
        CHECKF(cmd->spec != NULL, "out of memory");
        memcpy(cmd->spec, desc->spec.ptr, desc->spec.len);
    }
    cmd->desc.spec.ptr = cmd->spec;
    cmd->fn = fn;
    cmd->ctx = ctx;
    cmd->timeout_ns = timeout_ns;
    cmd->seen_deadline_ns = UINT64_MAX;
    /* An UPDATE's time starts when it is sent: what it waits for has a deadline of its own. */
    cmd->deadline_ns =
        desc->kind == CMD_UPDATE ? UINT64_MAX : after(lk_env_now_ns(self->ops->env), timeout_ns);
    if (desc->kind == CMD_PAUSE && cmd->deadline_ns != UINT64_MAX) {
        cmd->rolled_back_ns = cmd->deadline_ns;
    }
    limit_wait(self, cmd);
    append(&self->waiting, cmd);
    pump(self);
}

bool cmd_stream_on_seen(cmd_stream_t *self, const msg_seen_t *seen)
{
    link_t *link = &self->links[seen->rank];
    if (seen->generation != self->generation || seen->number > self->last_number || link->removed) {
        return false;
    }
    if (seen->number > link->seen) {
        link->seen = seen->number;
        link->sent = LK_MAX(link->sent, link->seen);
    } else if (link->sent > seen->number &&
               lk_env_now_ns(self->ops->env) - link->last_send_ns > 100 * LK_MS_NS) {
        /* It repeats itself: something in between was lost. */
        send_again(self, (uint32_t)seen->rank);
    }
    sweep(self);
    return true;
}

static char *copy(msg_str_t s)
{
    return s.len > 0 ? strndup(s.ptr, s.len) : NULL;
}

void cmd_stream_on_here(cmd_stream_t *self, uint32_t rank)
{
    send_again(self, rank);
}

/* ---- deadlines ---- */

static void name_ranks(const cmd_stream_t *self, const command_t *cmd, bool seen, lk_buf_t *out)
{
    uint32_t found = 0;
    size_t start = out->len;
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        bool has_seen = self->links[r].seen >= cmd->number;
        if (!self->links[r].removed && !cmd->slots[r].done && has_seen == seen) {
            lk_buf_printf(out, "%s%u", found++ > 0 ? ", " : "", r);
        }
    }
    if (found > 0) {
        char list[2048];
        snprintf(list, sizeof list, "%.*s", (int)(out->len - start), (char *)out->data + start);
        out->len = start;
        lk_buf_printf(out, "%s %s %s did not %s",
                      start > 0 && out->data[start - 1] == ':' ? "" : ";",
                      found > 1 ? "ranks" : "rank", list, seen ? "finish" : "receive it");
    }
}

static void expiry_text(const cmd_stream_t *self, const command_t *cmd, uint64_t limit_ns,
                        lk_buf_t *out)
{
    lk_buf_printf(out, "%s was not completed within %g s:", command_name(cmd),
                  (double)limit_ns / LK_SECOND_NS);
    if (cmd->number == 0) {
        lk_buf_str(out, " it was not sent, because an earlier weight call is not over");
        return;
    }
    name_ranks(self, cmd, false, out);
    name_ranks(self, cmd, true, out);
}

static void roll_back(cmd_stream_t *self, uint64_t number)
{
    command_t *cmd = calloc(1, sizeof *cmd + self->config->n_ranks * sizeof cmd->slots[0]);
    CHECKF(cmd != NULL, "out of memory");
    cmd->desc = (cmd_desc_t){.kind = CMD_CANCEL, .target = number};
    cmd->deadline_ns = cmd->seen_deadline_ns = UINT64_MAX;
    cmd->next = self->waiting; /* before what callers asked for later */
    self->waiting = cmd;
    pump(self);
}

static void expire_update(cmd_stream_t *self, command_t *cmd, uint64_t now, lk_buf_t *text)
{
    if (cmd->expired != NULL) { /* cancelled, and still not everybody answered */
        cmd->deadline_ns = cmd->seen_deadline_ns = UINT64_MAX;
        finish(self, cmd, LK_ERR_TIMEOUT, cmd->expired);
        for (command_t *next = self->waiting; next != NULL; next = next->next) {
            limit_wait(self, next);
        }
        return;
    }
    bool by_seen = now < cmd->deadline_ns;
    expiry_text(self, cmd, by_seen ? self->config->control_timeout_ns : cmd->timeout_ns, text);
    cmd->expired = strdup(lk_buf_cstr(text));
    CHECKF(cmd->expired != NULL, "out of memory");
    cmd->deadline_ns = after(now, self->config->control_timeout_ns);
    cmd->seen_deadline_ns = UINT64_MAX;
    cmd_stream_cancel_update(self, cmd->number, cmd->expired);
}

static void expire(cmd_stream_t *self, command_t *cmd, uint64_t now)
{
    lk_buf_t text;
    lk_buf_init(&text, 8192);
    if (cmd->number != 0 && cmd->desc.kind == CMD_UPDATE) {
        expire_update(self, cmd, now, &text);
    } else {
        cmd->deadline_ns = UINT64_MAX;
        expiry_text(self, cmd, cmd->timeout_ns, &text);
        if (cmd->number == 0) {
            for (command_t **p = &self->waiting; *p != NULL; p = &(*p)->next) {
                if (*p == cmd) {
                    *p = cmd->next;
                    break;
                }
            }
            finish(self, cmd, LK_ERR_TIMEOUT, lk_buf_cstr(&text));
            command_free(self, cmd);
        } else if (cmd->desc.kind == CMD_PAUSE) {
            lk_buf_str(&text, "; the pause is rolled back");
            if (cmd->desc.mode == PAUSE_ABORT && everyone_saw(self, cmd->number)) {
                lk_buf_str(&text, "; ranks that agreed to it in time have ended their requests");
            }
            /* Under way before the caller hears of it: whoever is late may be back at once, and
             * what it sees without the CANCEL it carries out. */
            roll_back(self, cmd->number);
            finish(self, cmd, LK_ERR_TIMEOUT, lk_buf_cstr(&text));
        } else {
            lk_buf_str(&text, "; it takes effect when they do");
            finish(self, cmd, LK_ERR_TIMEOUT, lk_buf_cstr(&text));
        }
    }
    lk_buf_fini(&text);
}

bool cmd_stream_on_done(cmd_stream_t *self, const msg_done_t *done)
{
    if (done->generation != self->generation || done->number == 0 ||
        done->number > self->last_number || !lk_status_is_valid(done->status) ||
        done->status == LK_INPROGRESS || self->links[done->rank].removed) {
        return false;
    }
    link_t *link = &self->links[done->rank];
    link->seen = LK_MAX(link->seen, done->number); /* who has applied it has seen it */
    link->sent = LK_MAX(link->sent, link->seen);
    command_t *cmd = self->open;
    while (cmd != NULL && cmd->number != done->number) {
        cmd = cmd->next;
    }
    uint64_t now = lk_env_now_ns(self->ops->env);
    if (cmd != NULL && cmd->rolled_back_ns != 0 && cmd->fn != NULL && now >= cmd->deadline_ns) {
        expire(self, cmd, now); /* a rank that was late as well has ended no requests */
    }
    if (cmd != NULL && !cmd->slots[done->rank].done) {
        slot_t *slot = &cmd->slots[done->rank];
        slot->done = true;
        slot->status = (lk_status_t)done->status;
        slot->text = copy(done->text);
        slot->body = copy(done->body);
        cmd->n_done++;
        if (all_done(self, cmd)) {
            finish(self, cmd, LK_OK, NULL);
            pump(self);
        }
    }
    sweep(self);
    return true;
}

static command_t *find_expired(const cmd_stream_t *self, uint64_t now)
{
    for (command_t *cmd = self->open; cmd != NULL; cmd = cmd->next) {
        bool unseen = now >= cmd->seen_deadline_ns && !everyone_saw(self, cmd->number);
        if (cmd->fn != NULL && (now >= cmd->deadline_ns || unseen)) {
            return cmd;
        }
    }
    for (command_t *cmd = self->waiting; cmd != NULL; cmd = cmd->next) {
        if (cmd->fn != NULL && now >= cmd->deadline_ns) {
            return cmd;
        }
    }
    return NULL;
}

/* Asks again for an answer that may have been lost. The rank has the command: no spec. */
static void probe(cmd_stream_t *self, uint32_t rank)
{
    if (self->links[rank].removed) {
        return;
    }
    for (const command_t *cmd = self->open; cmd != NULL; cmd = cmd->next) {
        if (!cmd->slots[rank].done && cmd->number <= self->links[rank].seen &&
            (cmd->fn != NULL || cmd->desc.kind == CMD_UPDATE)) {
            if (!send_command(self, rank, cmd, false)) {
                return;
            }
            self->links[rank].last_send_ns = lk_env_now_ns(self->ops->env);
            if (cmd->expired != NULL) {
                cmd_stream_cancel_update(self, cmd->number, cmd->expired);
            }
        }
    }
}

void cmd_stream_on_loss(cmd_stream_t *self, uint32_t rank)
{
    send_again(self, rank);
    probe(self, rank);
}

void cmd_stream_poll(cmd_stream_t *self)
{
    uint64_t now = lk_env_now_ns(self->ops->env);
    command_t *cmd;
    while ((cmd = find_expired(self, now)) != NULL) {
        expire(self, cmd, now);
    }
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        uint64_t quiet = now - self->links[r].last_send_ns;
        if (self->links[r].removed) {
            continue;
        }
        if (self->links[r].seen < self->last_number) {
            if (quiet >= ENGINE_CLIENT_RESEND_NS) {
                send_again(self, r);
            } else if (self->links[r].sent < self->last_number) {
                send_unsent(self, r);
            }
        } else if (quiet >= PROBE_NS) {
            probe(self, r);
        }
    }
    sweep(self);
}

void cmd_stream_restart(cmd_stream_t *self, lk_status_t status, const char *text)
{
    command_t *lists[2] = {self->open, self->waiting};
    if (lists[0] == NULL && lists[1] == NULL && self->last_number == 0) {
        return;
    }
    self->open = self->waiting = NULL;
    self->generation++;
    self->last_number = 0;
    for (uint32_t r = 0; r < self->config->n_ranks; r++) {
        self->links[r] = (link_t){.removed = self->links[r].removed};
    }
    for (int i = 0; i < 2; i++) {
        for (command_t *cmd = lists[i]; cmd != NULL; cmd = cmd->next) {
            finish(self, cmd, status, text);
        }
    }
    /* A restart from inside one of this stream's own callbacks would free what it stands on. */
    CHECK(self->depth == 0);
    free_list(self, lists[0]);
    free_list(self, lists[1]);
}

void cmd_stream_remove(cmd_stream_t *self, uint32_t rank)
{
    CHECK(self->open == NULL && self->waiting == NULL && !self->links[rank].removed);
    self->links[rank].removed = true;
    self->n_members--;
}

void cmd_stream_set_group_epoch(cmd_stream_t *self, uint64_t group_epoch)
{
    self->group_epoch = group_epoch;
}
