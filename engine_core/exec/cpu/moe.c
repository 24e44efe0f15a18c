#include "engine_core/exec/cpu/moe.h"

#include "base/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WAVE_ROWS 512 /* pairs computed together; bounds the scratch */

typedef struct {
    uint32_t tokens, pairs, row_bytes, zero;
} header_t;

typedef struct {
    uint32_t row, expert;
} wire_pair_t;

/* One expert output to compute. x and y may be unaligned. */
typedef struct {
    const uint8_t *x;
    uint8_t *y;      /* float32 [hidden] */
    uint32_t expert; /* local index */
} pair_t;

struct moe {
    const cpu_model_t *model;
    team_t *team;
    compute_t compute;
    uint32_t ranks, rank, max_tokens, top_k, experts, hidden, inter, wave_rows;
    size_t row_bytes, max_own, max_remote, send_bytes;
    arena_t arena;

    uint32_t layer, n_tokens;
    uint32_t *owner;  /* [experts] rank */
    float *probs;     /* [experts] */
    uint32_t *ids;    /* [tokens, top_k] */
    float *weights;   /* [tokens, top_k] */
    float *outputs;   /* [tokens, top_k, hidden] */
    const uint8_t *x; /* [tokens, hidden], the caller's */

    pair_t *pairs, *sorted; /* [max(max_own, max_remote)] */
    size_t n_pairs;
    uint32_t *starts; /* [n_local + 1] */

    /* dispatch of this rank: per peer, pairs in the order sent */
    uint32_t *sent_tokens, *sent_pairs, *sent_first; /* [ranks]; first index into sent */
    uint32_t *sent;                                  /* [tokens * top_k]: token * top_k + slot */
    uint32_t *token_row;                             /* [ranks]: rows written so far */
    ep_buf_t *bufs;                                  /* [ranks] */
    uint8_t *send;                                   /* [send_bytes] */

    /* one wave */
    mlp_segment_t *segments; /* [n_local] */
    uint32_t n_segments, wave_n;
    const pair_t *wave;
    uint8_t *wave_x;
    float *wave_gate, *wave_up, *wave_y;
    void *wave_act;
    float *h;
};

static void list_buffers(void *arg, arena_t *a)
{
    moe_t *m = arg;
    const size_t pairs = (size_t)m->max_tokens * m->top_k;
    const size_t most = LK_MAX(m->max_own, m->max_remote);
    m->owner = arena_take(a, m->experts, sizeof *m->owner);
    m->probs = arena_take(a, m->experts, sizeof *m->probs);
    m->ids = arena_take(a, pairs, sizeof *m->ids);
    m->weights = arena_take(a, pairs, sizeof *m->weights);
    m->outputs = arena_take(a, pairs * m->hidden, sizeof *m->outputs);
    m->pairs = arena_take(a, most, sizeof *m->pairs);
    m->sorted = arena_take(a, most, sizeof *m->sorted);
    m->starts = arena_take(a, m->model->n_local + 1, sizeof *m->starts);
    m->sent_tokens = arena_take(a, m->ranks, sizeof *m->sent_tokens);
    m->sent_pairs = arena_take(a, m->ranks, sizeof *m->sent_pairs);
    m->sent_first = arena_take(a, m->ranks, sizeof *m->sent_first);
    m->sent = arena_take(a, pairs, sizeof *m->sent);
    m->token_row = arena_take(a, m->ranks, sizeof *m->token_row);
    m->bufs = arena_take(a, m->ranks, sizeof *m->bufs);
    m->send = arena_take(a, m->send_bytes, 1);
    m->segments = arena_take(a, m->model->n_local, sizeof *m->segments);
    m->wave_x = arena_take(a, m->wave_rows, m->row_bytes);
    m->wave_gate = arena_take(a, (size_t)m->wave_rows * m->inter, sizeof(float));
    m->wave_up = arena_take(a, (size_t)m->wave_rows * m->inter, sizeof(float));
    m->wave_act = arena_take(a, (size_t)m->wave_rows * m->inter, compute_bytes(&m->compute));
    m->wave_y = arena_take(a, (size_t)m->wave_rows * m->hidden, sizeof(float));
}

/* Upper bounds of pairs and of message bytes, from the batch's limits; peers have the same ones. */
static void set_bounds(moe_t *m)
{
    const size_t t = m->max_tokens, peers = m->ranks - 1, local = m->model->n_local;
    const size_t here = LK_MIN(m->top_k, local); /* pairs a token can have on one rank */
    m->max_own = t * here;
    m->max_remote = peers * t * here;
    const size_t away = LK_MIN(m->top_k, peers); /* ranks a token can go to */
    /* each rank's part is rounded up to 64 bytes */
    size_t dispatch = m->ranks * (sizeof(header_t) + 64) + t * m->top_k * sizeof(wire_pair_t) +
                      t * away * m->row_bytes;
    size_t combine = m->ranks * (sizeof(header_t) + 64) + m->max_remote * m->hidden * sizeof(float);
    m->send_bytes = peers > 0 ? LK_MAX(dispatch, combine) : 0;
    m->wave_rows = (uint32_t)LK_MIN(LK_MAX(m->max_own, m->max_remote), WAVE_ROWS);
}

lk_status_t moe_new(const moe_options_t *o, moe_t **out, lk_error_t *err)
{
    const model_config_t *c = o->config->model;
    moe_t *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the experts' buffers");
    }
    m->model = o->model;
    m->team = o->team;
    m->compute = (compute_t){.kernels = o->kernels, .bf16 = o->config->dtype == LK_DTYPE_BF16};
    m->ranks = o->config->ep.size;
    m->rank = o->config->ep.rank;
    m->max_tokens = o->config->max_tokens;
    m->top_k = c->num_experts_per_tok;
    m->experts = c->num_experts;
    m->hidden = c->hidden_size;
    m->inter = c->moe_intermediate_size;
    m->row_bytes = m->hidden * compute_bytes(&m->compute);
    set_bounds(m);
    if (arena_init(&m->arena, list_buffers, m, "expert buffers", err) < 0) {
        moe_destroy(&m);
        return LK_ERR_NO_MEMORY;
    }
    for (uint32_t r = 0; r < m->ranks; r++) {
        uint32_t end = ep_first_expert(m->experts, r + 1, m->ranks);
        for (uint32_t e = ep_first_expert(m->experts, r, m->ranks); e < end; e++) {
            m->owner[e] = r;
        }
    }
    *out = m;
    return LK_OK;
}

void moe_destroy(moe_t **self_p)
{
    moe_t *m = *self_p;
    if (m == NULL) {
        return;
    }
    *self_p = NULL;
    arena_fini(&m->arena);
    free(m);
}

void moe_route(const float *logits, uint32_t experts, uint32_t k, bool norm, float *scratch,
               uint32_t *ids, float *weights)
{
    float top = logits[0], sum = 0;
    for (uint32_t e = 1; e < experts; e++) {
        top = fmaxf(top, logits[e]);
    }
    for (uint32_t e = 0; e < experts; e++) {
        scratch[e] = expf(logits[e] - top);
        sum += scratch[e];
    }
    float chosen = 0;
    for (uint32_t i = 0; i < k; i++) {
        /* taken ones are -1; every expert is picked once even if all logits are NaN */
        uint32_t best = experts;
        for (uint32_t e = 0; e < experts; e++) {
            if (scratch[e] != -1.0f && (best == experts || scratch[e] > scratch[best])) {
                best = e;
            }
        }
        ids[i] = best;
        weights[i] = scratch[best] / sum;
        chosen += weights[i];
        scratch[best] = -1.0f;
    }
    for (uint32_t i = 0; norm && i < k; i++) {
        weights[i] /= chosen;
    }
}

/* ---- computing pairs ---- */

static void wave_worker(worker_t *w, void *arg)
{
    moe_t *m = arg;
    for (uint32_t i = team_take(w); i < m->wave_n; i = team_take(w)) {
        memcpy(m->wave_x + i * m->row_bytes, m->wave[i].x, m->row_bytes);
    }
    team_barrier(w);
    const mlp_t mlp = {
        .segments = m->segments,
        .n_segments = m->n_segments,
        .hidden = m->hidden,
        .inter = m->inter,
        .x = m->wave_x,
        .ldx = m->hidden,
        .gate = m->wave_gate,
        .up = m->wave_up,
        .act = m->wave_act,
        .y = m->wave_y,
    };
    mlp_run(&m->compute, w, &mlp);
    team_barrier(w);
    for (uint32_t i = team_take(w); i < m->wave_n; i = team_take(w)) {
        memcpy(m->wave[i].y, m->wave_y + (size_t)i * m->hidden, m->hidden * sizeof(float));
    }
}

/* Orders pairs by expert (stably), then computes them some rows at a time. */
static void compute_pairs(moe_t *m)
{
    const uint32_t local = m->model->n_local;
    memset(m->starts, 0, (local + 1) * sizeof *m->starts);
    for (size_t i = 0; i < m->n_pairs; i++) {
        m->starts[m->pairs[i].expert + 1]++;
    }
    for (uint32_t e = 0; e < local; e++) {
        m->starts[e + 1] += m->starts[e];
    }
    for (size_t i = 0; i < m->n_pairs; i++) {
        m->sorted[m->starts[m->pairs[i].expert]++] = m->pairs[i];
    }
    const mlp_weights_t *experts = m->model->layers[m->layer].experts;
    for (size_t done = 0; done < m->n_pairs; done += m->wave_n) {
        m->wave = m->sorted + done;
        m->wave_n = (uint32_t)LK_MIN(m->n_pairs - done, m->wave_rows);
        m->n_segments = 0;
        for (uint32_t i = 0; i < m->wave_n; i++) {
            if (i == 0 || m->wave[i].expert != m->wave[i - 1].expert) {
                m->segments[m->n_segments++] =
                    (mlp_segment_t){.weights = &experts[m->wave[i].expert], .row = i};
            }
            m->segments[m->n_segments - 1].rows++;
        }
        team_run(m->team, wave_worker, m);
    }
    m->n_pairs = 0;
}

/* ---- dispatch ---- */

static float *output(const moe_t *m, size_t pair)
{
    return m->outputs + pair * m->hidden;
}

/* Counts, per rank, the tokens and pairs that go there. */
static void count_sends(moe_t *m)
{
    memset(m->sent_tokens, 0, m->ranks * sizeof *m->sent_tokens);
    memset(m->sent_pairs, 0, m->ranks * sizeof *m->sent_pairs);
    for (uint32_t t = 0; t < m->n_tokens; t++) {
        const uint32_t *ids = m->ids + (size_t)t * m->top_k;
        for (uint32_t i = 0; i < m->top_k; i++) {
            uint32_t r = m->owner[ids[i]];
            bool seen = false;
            for (uint32_t j = 0; j < i; j++) {
                seen |= m->owner[ids[j]] == r;
            }
            m->sent_tokens[r] += !seen;
            m->sent_pairs[r]++;
        }
    }
}

/* Lays out one buffer per peer with its header; own rank's and empty ones stay NULL. */
static void lay_out(moe_t *m, const uint32_t *tokens, const uint32_t *pairs, size_t pair_bytes,
                    size_t row_bytes)
{
    size_t at = 0;
    for (uint32_t r = 0; r < m->ranks; r++) {
        m->bufs[r] = (ep_buf_t){0};
        if (r == m->rank || pairs[r] == 0) {
            continue;
        }
        uint32_t n_tokens = tokens != NULL ? tokens[r] : 0;
        uint32_t rows = tokens != NULL ? tokens[r] : pairs[r];
        header_t *head = (header_t *)(m->send + at);
        *head = (header_t){n_tokens, pairs[r], (uint32_t)row_bytes, 0};
        m->bufs[r].data = head;
        m->bufs[r].len = sizeof *head + pairs[r] * pair_bytes + rows * row_bytes;
        at += (m->bufs[r].len + 63) / 64 * 64;
        CHECK(at <= m->send_bytes);
    }
}

static void fill_sends(moe_t *m)
{
    uint32_t first = 0;
    for (uint32_t r = 0; r < m->ranks; r++) {
        m->sent_first[r] = first;
        first += m->sent_pairs[r];
        m->sent_pairs[r] = 0; /* counted again while filling */
        m->token_row[r] = 0;
    }
    for (uint32_t t = 0; t < m->n_tokens; t++) {
        const uint8_t *x = m->x + t * m->row_bytes;
        for (uint32_t i = 0; i < m->top_k; i++) {
            const uint32_t pair = t * m->top_k + i, expert = m->ids[pair];
            const uint32_t r = m->owner[expert];
            if (r == m->rank) {
                m->pairs[m->n_pairs++] =
                    (pair_t){x, (uint8_t *)output(m, pair), expert - m->model->first_expert};
                continue;
            }
            const uint32_t total = ((const header_t *)m->bufs[r].data)->pairs;
            uint8_t *body = (uint8_t *)(uintptr_t)m->bufs[r].data + sizeof(header_t);
            uint8_t *rows = body + total * sizeof(wire_pair_t);
            bool sent = false;
            for (uint32_t j = 0; j < i; j++) {
                sent |= m->owner[m->ids[t * m->top_k + j]] == r;
            }
            if (!sent) {
                memcpy(rows + m->token_row[r]++ * m->row_bytes, x, m->row_bytes);
            }
            uint32_t n = m->sent_pairs[r]++;
            ((wire_pair_t *)body)[n] = (wire_pair_t){m->token_row[r] - 1, expert};
            m->sent[m->sent_first[r] + n] = pair;
        }
    }
}

void moe_begin(moe_t *m, uint32_t l, uint32_t n, const float *router, const void *x)
{
    m->layer = l;
    m->n_tokens = n;
    m->x = x;
    m->n_pairs = 0;
    for (uint32_t t = 0; t < n; t++) {
        moe_route(router + (size_t)t * m->experts, m->experts, m->top_k,
                  m->model->config.norm_topk_prob, m->probs, m->ids + (size_t)t * m->top_k,
                  m->weights + (size_t)t * m->top_k);
    }
    count_sends(m);
    lay_out(m, m->sent_tokens, m->sent_pairs, sizeof(wire_pair_t), m->row_bytes);
    fill_sends(m);
}

const uint32_t *moe_ids(const moe_t *m)
{
    return m->ids;
}

void moe_own(moe_t *m)
{
    compute_pairs(m);
}

const ep_buf_t *moe_send(const moe_t *m)
{
    return m->bufs;
}

/* ---- the peers' tokens ---- */

/* Checks a dispatch message's header against its length. */
static lk_status_t read_header(const moe_t *m, uint32_t rank, const ep_buf_t *buf, header_t *out,
                               lk_error_t *err)
{
    *out = (header_t){0};
    if (buf->len == 0) {
        return LK_OK;
    }
    if (buf->len < sizeof *out) {
        return lk_error_set(err, LK_ERR_PEER, "expert exchange: rank %u sent %zu bytes", rank,
                            buf->len);
    }
    memcpy(out, buf->data, sizeof *out);
    const uint64_t here = LK_MIN(m->top_k, m->model->n_local);
    const uint64_t expected = sizeof *out + (uint64_t)out->pairs * sizeof(wire_pair_t) +
                              (uint64_t)out->tokens * m->row_bytes;
    if (out->row_bytes != m->row_bytes || out->tokens > m->max_tokens ||
        out->pairs > out->tokens * here || buf->len != expected) {
        return lk_error_set(err, LK_ERR_PEER,
                            "expert exchange: rank %u sent %zu bytes for %u tokens and %u pairs of "
                            "%u bytes; at most %u tokens of %zu bytes fit here",
                            rank, buf->len, out->tokens, out->pairs, out->row_bytes, m->max_tokens,
                            m->row_bytes);
    }
    return LK_OK;
}

static lk_status_t check_dispatch(moe_t *m, uint32_t rank, const ep_buf_t *buf, lk_error_t *err)
{
    header_t head;
    LK_RETURN_IF_ERROR(read_header(m, rank, buf, &head, err));
    m->token_row[rank] = head.pairs; /* how many rows the answer has */
    const uint8_t *at = (const uint8_t *)buf->data + sizeof head;
    for (uint32_t i = 0; i < head.pairs; i++) {
        wire_pair_t p;
        memcpy(&p, at + i * sizeof p, sizeof p);
        if (p.row >= head.tokens || p.expert >= m->experts || m->owner[p.expert] != m->rank) {
            return lk_error_set(err, LK_ERR_PEER,
                                "expert exchange: rank %u asks for expert %u of row %u of %u", rank,
                                p.expert, p.row, head.tokens);
        }
    }
    return LK_OK;
}

lk_status_t moe_remote(moe_t *m, const ep_buf_t *recv, lk_error_t *err)
{
    for (uint32_t r = 0; r < m->ranks; r++) {
        m->token_row[r] = 0;
        if (r != m->rank) {
            LK_RETURN_IF_ERROR(check_dispatch(m, r, &recv[r], err));
        }
    }
    lay_out(m, NULL, m->token_row, 0, m->hidden * sizeof(float));
    for (uint32_t r = 0; r < m->ranks; r++) {
        const uint32_t n = m->token_row[r];
        if (n == 0) {
            continue;
        }
        const uint8_t *pairs = (const uint8_t *)recv[r].data + sizeof(header_t);
        const uint8_t *rows = pairs + n * sizeof(wire_pair_t);
        uint8_t *y = (uint8_t *)(uintptr_t)m->bufs[r].data + sizeof(header_t);
        for (uint32_t i = 0; i < n; i++) {
            wire_pair_t p;
            memcpy(&p, pairs + i * sizeof p, sizeof p);
            CHECK(m->n_pairs < m->max_remote);
            m->pairs[m->n_pairs++] =
                (pair_t){rows + p.row * m->row_bytes, y + i * m->hidden * sizeof(float),
                         p.expert - m->model->first_expert};
        }
    }
    compute_pairs(m);
    return LK_OK;
}

/* ---- home ---- */

lk_status_t moe_home(moe_t *m, const ep_buf_t *recv, lk_error_t *err)
{
    const size_t row = m->hidden * sizeof(float);
    for (uint32_t r = 0; r < m->ranks; r++) {
        const uint32_t n = r != m->rank ? m->sent_pairs[r] : 0;
        const uint64_t expected = n > 0 ? sizeof(header_t) + (uint64_t)n * row : 0;
        header_t head = {0};
        if (r != m->rank && recv[r].len == expected && n > 0) {
            memcpy(&head, recv[r].data, sizeof head);
        }
        if (r != m->rank && (recv[r].len != expected || head.pairs != n)) {
            return lk_error_set(
                err, LK_ERR_PEER,
                "expert exchange: rank %u returned %zu bytes for %u pairs, expected "
                "%llu",
                r, recv[r].len, n, (unsigned long long)expected);
        }
        for (uint32_t i = 0; i < n; i++) {
            memcpy(output(m, m->sent[m->sent_first[r] + i]),
                   (const uint8_t *)recv[r].data + sizeof head + i * row, row);
        }
    }
    return LK_OK;
}

static void combine_worker(worker_t *w, void *arg)
{
    moe_t *m = arg;
    for (uint32_t t = team_take(w); t < m->n_tokens; t = team_take(w)) {
        float *h = m->h + (size_t)t * m->hidden;
        float *sum = output(m, (size_t)t * m->top_k); /* slot 0's output becomes the sum */
        for (uint32_t i = 0; i < m->top_k; i++) {
            const float weight = m->weights[(size_t)t * m->top_k + i];
            const float *y = output(m, (size_t)t * m->top_k + i);
            for (uint32_t d = 0; d < m->hidden; d++) {
                sum[d] = i == 0 ? weight * y[d] : sum[d] + weight * y[d];
            }
        }
        for (uint32_t d = 0; d < m->hidden; d++) {
            h[d] += sum[d];
        }
    }
}

void moe_combine(moe_t *m, float *h)
{
    m->h = h;
    if (m->n_tokens > 0) {
        team_run(m->team, combine_worker, m);
    }
}
