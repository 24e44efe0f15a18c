#include "tests/cluster/rl_weights.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    rl_weights_t *out;
    uint64_t seed;
    lk_dtype_t dtype;
} maker_t;

static lst_tensor_t *add(rl_weights_t *w)
{
    w->t = realloc(w->t, (w->n + 1) * sizeof *w->t);
    ck_assert_ptr_nonnull(w->t);
    w->t[w->n] = (lst_tensor_t){0};
    return &w->t[w->n++];
}

static lk_status_t make_one(void *ctx, const model_tensor_t *tensor, lk_error_t *err)
{
    maker_t *m = ctx;
    lst_tensor_t *t = add(m->out);
    void *data = malloc(tensor->numel * dtype_bytes(m->dtype));
    ck_assert_ptr_nonnull(data);
    ck_ok(model_tensor_random(tensor, m->seed, m->dtype, 0, tensor->numel, data));
    *t = (lst_tensor_t){.name = strdup(tensor->name),
                        .dtype = dtype_torch_name(m->dtype),
                        .ndim = tensor->ndim,
                        .data = data};
    memcpy(t->shape, tensor->shape, sizeof tensor->shape);
    return LK_OK;
}

rl_weights_t rl_weights(const char *dir, uint64_t seed, lk_dtype_t dtype)
{
    rl_weights_t w = {0};
    model_config_t config;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(model_config_load(dir, &config, &err) == LK_OK, "%s", err.text);
    ck_ok(model_tensors_each(&config, make_one, &(maker_t){&w, seed, dtype}, &err));
    return w;
}

void rl_weights_fini(rl_weights_t *self)
{
    for (size_t i = 0; i < self->n; i++) {
        free((void *)self->t[i].name);
        free((void *)self->t[i].data);
    }
    free(self->t);
    *self = (rl_weights_t){0};
}

const lst_tensor_t *rl_find(const rl_weights_t *self, const char *name)
{
    for (size_t i = 0; i < self->n; i++) {
        if (strcmp(self->t[i].name, name) == 0) {
            return &self->t[i];
        }
    }
    ck_abort_msg("no tensor %s", name);
    return NULL;
}

/* ---- spellings ---- */

static uint64_t bytes_of(const lst_tensor_t *t)
{
    lk_dtype_t dtype;
    ck_assert(dtype_parse(t->dtype, &dtype));
    uint64_t n = dtype_bytes(dtype);
    for (unsigned d = 0; d < t->ndim; d++) {
        n *= t->shape[d];
    }
    return n;
}

/* Which part of which fused tensor it is; false: it stays as it is. */
static bool fused_name(const char *name, rl_spelling_t spelling, char *out, size_t room,
                       unsigned *part, bool *experts)
{
    static const struct {
        const char *from, *to;
        unsigned part;
        bool experts;
    } rules[] = {{"q_proj", "qkv_proj", 0, false},     {"k_proj", "qkv_proj", 1, false},
                 {"v_proj", "qkv_proj", 2, false},     {"gate_proj", "gate_up_proj", 0, true},
                 {"up_proj", "gate_up_proj", 1, true}, {"down_proj", "down_proj", 0, true}};
    const char *at = strstr(name, ".experts.");
    unsigned expert = 0;
    int used = 0;
    *experts = spelling == RL_FUSED_EXPERTS;
    if (*experts && (at == NULL || sscanf(at, ".experts.%u.%n", &expert, &used) != 1)) {
        return false;
    }
    for (size_t i = 0; i < LK_ARRAY_LEN(rules) && spelling != RL_CANONICAL; i++) {
        char key[40];
        snprintf(key, sizeof key, ".%s.", rules[i].from);
        const char *found = strstr(name, key);
        if (found == NULL ||
            (*experts ? !rules[i].experts
                      : rules[i].from == rules[i].to || strcmp(rules[i].from, rules[i].to) == 0)) {
            continue;
        }
        if (*experts) {
            snprintf(out, room, "%.*s.experts.%s", (int)(at - name), name, rules[i].to);
            *part = expert * 2 + rules[i].part;
        } else {
            snprintf(out, room, "%.*s.%s.%s", (int)(found - name), name, rules[i].to,
                     found + strlen(key));
            *part = rules[i].part;
        }
        return true;
    }
    return false;
}

#define MAX_PARTS 64

/* All parts of `name`, in their order, as one tensor. */
static void fuse(const rl_weights_t *from, rl_spelling_t spelling, const char *name,
                 rl_weights_t *to)
{
    const lst_tensor_t *parts[MAX_PARTS] = {NULL};
    uint64_t bytes = 0, rows = 0, n_parts = 0;
    bool experts = false;
    unsigned part;
    char fused[256];
    for (size_t i = 0; i < from->n; i++) {
        if (fused_name(from->t[i].name, spelling, fused, sizeof fused, &part, &experts) &&
            strcmp(fused, name) == 0) {
            ck_assert_uint_lt(part, MAX_PARTS);
            parts[part] = &from->t[i];
            bytes += bytes_of(&from->t[i]);
            rows += from->t[i].shape[0];
            n_parts++;
        }
    }
    uint8_t *data = malloc(bytes), *end = data;
    ck_assert_ptr_nonnull(data);
    const lst_tensor_t *first = parts[0];
    for (unsigned p = 0; p < MAX_PARTS; p++) {
        if (parts[p] != NULL) {
            memcpy(end, parts[p]->data, bytes_of(parts[p]));
            end += bytes_of(parts[p]);
        }
    }
    lst_tensor_t *t = add(to);
    *t = *first;
    t->name = strdup(name);
    t->data = data;
    if (experts) { /* [experts, rows of each, columns] */
        uint64_t n = strstr(name, "down_proj") != NULL ? n_parts : n_parts / 2;
        t->ndim = 3;
        t->shape[2] = first->shape[1];
        t->shape[1] = rows / n;
        t->shape[0] = n;
    } else {
        t->shape[0] = rows;
    }
}

rl_weights_t rl_spell(const rl_weights_t *from, rl_spelling_t spelling)
{
    rl_weights_t to = {0};
    for (size_t i = 0; i < from->n; i++) {
        const lst_tensor_t *t = &from->t[i];
        char name[256];
        unsigned part;
        bool experts;
        if (!fused_name(t->name, spelling, name, sizeof name, &part, &experts)) {
            lst_tensor_t *same = add(&to);
            *same = *t;
            same->name = strdup(t->name);
            same->data = memcpy(malloc(bytes_of(t)), t->data, bytes_of(t));
        } else if (part == 0) {
            fuse(from, spelling, name, &to);
        }
    }
    return to;
}

const char *rl_update_info(const lst_tensor_t *tensors, size_t n)
{
    static char *text;
    json_t *names = json_array(), *dtypes = json_array(), *shapes = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *shape = json_array();
        for (unsigned d = 0; d < tensors[i].ndim; d++) {
            json_array_append_new(shape, json_integer((json_int_t)tensors[i].shape[d]));
        }
        json_array_append_new(shapes, shape);
        json_array_append_new(names, json_string(tensors[i].name));
        json_array_append_new(dtypes, json_string(tensors[i].dtype));
    }
    json_t *body = json_pack("{s:{s:o,s:o,s:o}}", "update_info", "names", names, "dtype_names",
                             dtypes, "shapes", shapes);
    free(text);
    text = json_dumps(body, JSON_COMPACT);
    json_decref(body);
    return text;
}

/* ---- pushing ---- */

void rl_must(lst_t *lst, lst_status_t status, const char *what)
{
    ck_assert_msg(status == LST_OK, "%s: %d %s", what, status, lst_last_error(lst));
}

void rl_must_fail(lst_t *lst, lst_status_t status, lst_status_t want, const char *text)
{
    ck_assert_msg(status == want && strstr(lst_last_error(lst), text) != NULL,
                  "%d, not %d with \"%s\": %s", status, want, text, lst_last_error(lst));
}

void rl_push(lst_t *lst, const rl_weights_t *weights, bool packed, const char *version)
{
    lst_update_options_t options = {.packed = packed, .packed_buffer_size_bytes = 100000};
    rl_must(lst, lst_start(lst), "start");
    rl_must(lst, lst_update(lst, weights->t, weights->n, &options), "update");
    rl_must(lst, lst_finish(lst, version), "finish");
}

void rl_assert_holds(lst_t *lst, const rl_weights_t *weights, const char *version)
{
    lst_rank_info_t ranks[RL_MAX_RANKS];
    char own[33];
    size_t n = 0;
    rl_must(lst, lst_digest(lst, weights->t, weights->n, own), "digest");
    rl_must(lst, lst_weight_info(lst, ranks, LK_ARRAY_LEN(ranks), &n), "weight_info");
    ck_assert_uint_ge(n, 1);
    for (size_t r = 0; r < n; r++) {
        ck_assert_str_eq(ranks[r].digest, own);
        ck_assert_str_eq(ranks[r].version, version);
        ck_assert(!ranks[r].dirty);
        ck_assert_str_eq(ranks[r].state, "ready");
    }
}

/* ---- nothing changed ---- */

json_t *rl_tokens_of(const cluster_t *c, uint32_t first, uint32_t n_tokens)
{
    json_t *reply =
        cluster_call(c, "POST", "/v1/completions", rl_body(first, 12, n_tokens), 200, NULL);
    json_t *tokens = json_incref(
        json_object_get(json_array_get(json_object_get(reply, "choices"), 0), "token_ids"));
    json_decref(reply);
    return tokens;
}

/* The part of /weight_info that says what is held. */
static json_t *held(const cluster_t *c)
{
    static const char *const fields[] = {"rank", "version", "epoch", "digest", "dirty"};
    json_t *info = cluster_call(c, "GET", "/weight_info", NULL, 200, NULL);
    json_t *out = json_array();
    const json_t *ranks = json_object_get(info, "ranks");
    for (size_t r = 0; r < json_array_size(ranks); r++) {
        json_t *row = json_object();
        for (size_t i = 0; i < LK_ARRAY_LEN(fields); i++) {
            json_object_set(row, fields[i], json_object_get(json_array_get(ranks, r), fields[i]));
        }
        json_array_append_new(out, row);
    }
    json_decref(info);
    return out;
}

rl_snapshot_t rl_snapshot(const cluster_t *c)
{
    return (rl_snapshot_t){.info = held(c), .tokens = rl_tokens_of(c, 3, 16)};
}

void rl_assert_unchanged(const cluster_t *c, rl_snapshot_t *before)
{
    rl_snapshot_t now = rl_snapshot(c);
    char *a = json_dumps(before->info, 0), *b = json_dumps(now.info, 0);
    ck_assert_str_eq(a, b);
    ck_assert(json_equal(before->tokens, now.tokens));
    free(a);
    free(b);
    rl_snapshot_fini(&now);
}

void rl_snapshot_fini(rl_snapshot_t *snapshot)
{
    json_decref(snapshot->info);
    json_decref(snapshot->tokens);
}
