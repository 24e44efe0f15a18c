#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/mem_sink.h"
#include "transfer/update_session.h"

#include <stdio.h>
#include <string.h>

/* ---- a scripted transfer engine: it does what `next` says ---- */

static struct {
    lk_status_t init, update;
    bool aborted;
    uint64_t deliver; /* tensors handed to the sink before `update` is returned */
    wte_update_t last;
    weight_sink_t sink;
    size_t inits, finis;
    bool refuses;   /* in update_check */
    char first[64]; /* tensor of the last update */
} script;

static lk_status_t fake_init_check(const json_t *info, const wte_context_t *ctx, lk_error_t *err)
{
    if (json_object_get(info, "bad") != NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "Invalid init_info for fake: unknown field 'bad'");
    }
    return LK_OK;
}

static lk_status_t fake_init_post(void *state, const json_t *info, const wte_context_t *ctx,
                                  lk_error_t *err)
{
    script.inits++;
    script.aborted = false;
    return LK_OK;
}

static lk_status_t scripted(lk_status_t *what, lk_error_t *err)
{
    if (script.aborted) {
        script.aborted = false;
        return lk_error_set(err, LK_ERR_CANCELED, "aborted");
    }
    lk_status_t st = *what;
    return st < 0 ? lk_error_set(err, st, "scripted") : st;
}

static lk_status_t fake_init_test(void *state, lk_error_t *err)
{
    return scripted(&script.init, err);
}

static lk_status_t fake_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    if (script.refuses || json_object_get(update->update_info, "bad") != NULL) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "Invalid update_info for fake: unknown field 'bad'");
    }
    return LK_OK;
}

static lk_status_t fake_update_post(void *state, const wte_update_t *update,
                                    const weight_sink_t *sink, lk_error_t *err)
{
    script.last = *update;
    snprintf(script.first, sizeof script.first, "%s",
             update->n_tensors > 0 ? update->tensors[0].name : "");
    script.sink = *sink;
    return LK_OK;
}

static lk_status_t fake_update_test(void *state, lk_error_t *err)
{
    static const uint8_t zeros[4096];
    for (uint64_t i = 0; i < script.deliver; i++) {
        uint64_t bytes = 0;
        bool fits = tensor_desc_bytes(&script.last.tensors[i], &bytes);
        CHECK(fits && bytes <= sizeof zeros);
        LK_RETURN_IF_ERROR(weight_sink_store(&script.sink, i, zeros, bytes, err));
    }
    script.deliver = 0;
    return scripted(&script.update, err);
}

static void fake_abort(void *state)
{
    script.aborted = true;
}

static void fake_progress(const void *state, wte_progress_t *out)
{
    *out = (wte_progress_t){.tensors_total = script.last.n_tensors, .waiting_for = "the script"};
}

static size_t fake_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return 0;
}

static void fake_fini(void *state)
{
    script.finis++;
}

static const wte_ops_t fake_ops = {
    .abi_version = WTE_ABI_VERSION,
    .name = "fake",
    .state_size = 8,
    .init_check = fake_init_check,
    .init_post = fake_init_post,
    .init_test = fake_init_test,
    .update_check = fake_update_check,
    .update_post = fake_update_post,
    .update_test = fake_update_test,
    .abort = fake_abort,
    .progress = fake_progress,
    .pollfds = fake_pollfds,
    .fini = fake_fini,
};

/* ---- rig ---- */

static const tensor_desc_t model[] = {
    {.name = "a.weight", .dtype = LK_DTYPE_F32, .ndim = 2, .shape = {2, 3}},
    {.name = "b.weight", .dtype = LK_DTYPE_BF16, .ndim = 1, .shape = {5}},
};

#define INIT_OK "{\"init_info\": {}}"
#define UPDATE_A                                                                                   \
    "{\"update_info\": {\"names\": [\"a.weight\"], \"dtype_names\": [\"float32\"], \"shapes\": "   \
    "[[2, 3]]}}"
#define UPDATE_BOTH                                                                                \
    "{\"update_info\": {\"names\": [\"a.weight\", \"b.weight\"], \"dtype_names\": [\"float32\", "  \
    "\"bfloat16\"], \"shapes\": [[2, 3], [5]]}}"
#define UPDATE_NONE "{\"update_info\": {\"names\": [], \"dtype_names\": [], \"shapes\": []}}"
#define VERSION_OK  "{\"new_version\": \"v7\"}"

static mem_sink_t *sink;
static update_session_t *session;
static lk_error_t err;

static bool two_sets;

static void open_session(const wte_ops_t *ops, uint32_t rank)
{
    memset(&script, 0, sizeof script);
    sink = mem_sink_new(model, LK_ARRAY_LEN(model));
    wte_context_t ctx = {.dp_rank = rank,
                         .dp_size = 2,
                         .ranks_per_replica = 1,
                         .env = lk_env_real(),
                         .no_progress_ns = LK_SECOND_NS};
    sink->two_sets = two_sets;
    weight_sink_t s = mem_sink(sink);
    session = update_session_new(ops, &ctx, &s);
    ck_assert_ptr_nonnull(session);
}

static void setup(void)
{
    open_session(&fake_ops, 1);
}

static void teardown(void)
{
    update_session_destroy(&session);
    mem_sink_destroy(&sink);
}

static lk_status_t post(update_verb_t verb, const char *spec)
{
    err = LK_ERROR_INIT;
    return update_session_post(session, verb, spec, spec != NULL ? strlen(spec) : 0, &err);
}

static lk_status_t check(update_verb_t verb, const char *spec)
{
    err = LK_ERROR_INIT;
    return update_session_check(session, verb, spec, spec != NULL ? strlen(spec) : 0, &err);
}

/* A whole call that goes well on all ranks. */
static void call(update_verb_t verb, const char *spec)
{
    lk_status_t st = post(verb, spec);
    ck_assert_msg(st == LK_OK, "%s: %s", update_verb_name(verb), err.text);
    st = update_session_test(session, &err);
    ck_assert_msg(st == LK_OK, "%s: %s", update_verb_name(verb), err.text);
    ck_ok(update_session_outcome(session, verb, true, &err));
}

static void go_to(update_state_t state)
{
    if (state == UPDATE_STATE_UNCONFIGURED) {
        return;
    }
    if (state == UPDATE_STATE_INITIALISING) {
        script.init = LK_INPROGRESS;
        ck_ok(post(UPDATE_VERB_INIT, INIT_OK));
        ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
        return;
    }
    call(UPDATE_VERB_INIT, INIT_OK);
    if (state == UPDATE_STATE_READY) {
        return;
    }
    call(UPDATE_VERB_START, NULL);
    if (state == UPDATE_STATE_RECEIVING) {
        script.update = LK_INPROGRESS;
        ck_ok(post(UPDATE_VERB_UPDATE, UPDATE_A));
        ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
    }
}

static const char *const good_specs[] = {
    [UPDATE_VERB_INIT] = INIT_OK,    [UPDATE_VERB_START] = "{\"is_checkpoint_format\": true}",
    [UPDATE_VERB_UPDATE] = UPDATE_A, [UPDATE_VERB_FINISH] = "{\"weight_version\": \"v1\"}",
    [UPDATE_VERB_ABORT] = "",        [UPDATE_VERB_SET_VERSION] = VERSION_OK,
};

/* ---- every state x every verb ---- */

#define NO_START_UPDATE "start_weight_update must be called before update_weights."
#define NO_START_FINISH "finish_weight_update called without a matching start_weight_update."
#define ACTIVE                                                                                     \
    "start_weight_update called while a weight update is already active. Call "                    \
    "finish_weight_update first."
#define ACTIVE_INIT                                                                                \
    "init_weight_transfer_engine called while a weight update is active. Call "                    \
    "finish_weight_update or abort_weight_update first."
#define NO_INIT   "Weight transfer not initialized. Call init_weight_transfer_engine first."
#define INIT_BUSY "init_weight_transfer_engine has not finished yet."
#define BUSY      "update_weights has not finished yet."

static const struct {
    update_state_t state;
    update_verb_t verb;
    const char *refusal;  /* NULL: legal */
    update_state_t after; /* post, test and outcome went well; of a legal verb */
} table[] = {
#define S(name) UPDATE_STATE_##name
#define V(name) UPDATE_VERB_##name
    {S(UNCONFIGURED), V(INIT), NULL, S(READY)},
    {S(UNCONFIGURED), V(START), NO_INIT, 0},
    {S(UNCONFIGURED), V(UPDATE), NO_START_UPDATE, 0},
    {S(UNCONFIGURED), V(FINISH), NO_START_FINISH, 0},
    {S(UNCONFIGURED), V(ABORT), NULL, S(UNCONFIGURED)},
    {S(UNCONFIGURED), V(SET_VERSION), NULL, S(UNCONFIGURED)},
    {S(INITIALISING), V(INIT), INIT_BUSY, 0},
    {S(INITIALISING), V(START), INIT_BUSY, 0},
    {S(INITIALISING), V(UPDATE), NO_START_UPDATE, 0},
    {S(INITIALISING), V(FINISH), NO_START_FINISH, 0},
    {S(INITIALISING), V(ABORT), NULL, S(UNCONFIGURED)},
    {S(INITIALISING), V(SET_VERSION), NULL, S(READY)},
    {S(READY), V(INIT), NULL, S(READY)},
    {S(READY), V(START), NULL, S(OPEN)},
    {S(READY), V(UPDATE), NO_START_UPDATE, 0},
    {S(READY), V(FINISH), NO_START_FINISH, 0},
    {S(READY), V(ABORT), NULL, S(READY)},
    {S(READY), V(SET_VERSION), NULL, S(READY)},
    {S(OPEN), V(INIT), ACTIVE_INIT, 0},
    {S(OPEN), V(START), ACTIVE, 0},
    {S(OPEN), V(UPDATE), NULL, S(OPEN)},
    {S(OPEN), V(FINISH), NULL, S(READY)},
    {S(OPEN), V(ABORT), NULL, S(READY)},
    {S(OPEN), V(SET_VERSION), NULL, S(OPEN)},
    {S(RECEIVING), V(INIT), ACTIVE_INIT, 0},
    {S(RECEIVING), V(START), ACTIVE, 0},
    {S(RECEIVING), V(UPDATE), BUSY, 0},
    {S(RECEIVING), V(FINISH), BUSY, 0},
    {S(RECEIVING), V(ABORT), NULL, S(UNCONFIGURED)},
    {S(RECEIVING), V(SET_VERSION), NULL, S(OPEN)},
#undef S
#undef V
};
STATIC_ASSERT(LK_ARRAY_LEN(table) == 5 * 6, "every state with every verb");

START_TEST(state_by_verb)
{
    go_to(table[_i].state);
    ck_assert_int_eq(update_session_state(session), table[_i].state);
    update_verb_t verb = table[_i].verb;
    lk_status_t st = post(verb, good_specs[verb]);
    if (table[_i].refusal != NULL) {
        ck_assert_int_eq(st, LK_ERR_STATE);
        ck_assert_str_eq(err.text, table[_i].refusal);
        ck_assert_int_eq(update_session_state(session), table[_i].state);
        /* the group hears of the refusal: nothing changes */
        ck_ok(update_session_outcome(session, verb, false, &err));
        ck_assert_int_eq(update_session_state(session), table[_i].state);
        ck_assert(!update_session_touched(session));
        return;
    }
    ck_assert_msg(st == LK_OK, "%s", err.text);
    script.init = script.update = LK_OK;
    ck_ok(update_session_test(session, &err));
    ck_ok(update_session_outcome(session, verb, true, &err));
    ck_assert_int_eq(update_session_state(session), table[_i].after);
}
END_TEST

START_TEST(not_configured)
{
    teardown();
    open_session(NULL, 0);
    for (int verb = UPDATE_VERB_INIT; verb <= UPDATE_VERB_SET_VERSION; verb++) {
        bool version = verb == UPDATE_VERB_SET_VERSION;
        ck_assert_int_eq(check(verb, good_specs[verb]), version ? LK_OK : LK_ERR_STATE);
        ck_assert_int_eq(post(verb, good_specs[verb]), version ? LK_OK : LK_ERR_STATE);
        if (!version) {
            ck_assert_str_eq(err.text, "Weight transfer not configured. Please set "
                                       "weight_transfer_config to enable weight transfer.");
        }
        ck_ok(update_session_outcome(session, verb, version, &err));
    }
    ck_assert_int_eq(check(99, ""), LK_ERR_INVALID);
    struct pollfd fd;
    ck_assert_uint_eq(update_session_pollfds(session, &fd, 1), 0);
}
END_TEST

/* ---- bodies ---- */

#define TENSORS(names, dtypes, shapes)                                                             \
    "{\"update_info\": {\"names\": " names ", \"dtype_names\": " dtypes ", \"shapes\": " shapes "}}"
#define ONE(more)                                                                                  \
    "{\"update_info\": {\"names\": [\"a.weight\"], \"dtype_names\": [\"float32\"], \"shapes\": "   \
    "[[2, 3]], " more "}}"

static const struct {
    update_verb_t verb;
    const char *spec;
    const char *text; /* NULL: good; else a part of the refusal */
} bodies[] = {
    {UPDATE_VERB_INIT, "", "Invalid JSON format"},
    {UPDATE_VERB_INIT, "[]", "Invalid JSON format: the body must be an object"},
    {UPDATE_VERB_INIT, "{\"init_info\": {}", "Invalid JSON format"},
    {UPDATE_VERB_INIT, "{\"init_info\": {}, \"init_info\": {}}", "Invalid JSON format"},
    {UPDATE_VERB_INIT, "{}", "Missing 'init_info' in request body"},
    {UPDATE_VERB_INIT, "{\"init_info\": null}", "Missing 'init_info' in request body"},
    {UPDATE_VERB_INIT, "{\"init_info\": 5}", "'init_info' must be an object"},
    {UPDATE_VERB_INIT, "{\"init_info\": {\"bad\": 1}}", "unknown field 'bad'"},
    {UPDATE_VERB_INIT, INIT_OK, NULL},
    {UPDATE_VERB_START, "", NULL},
    {UPDATE_VERB_START, "{\"is_checkpoint_format\": false}", NULL},
    {UPDATE_VERB_UPDATE, "nonsense", "Invalid JSON format"},
    {UPDATE_VERB_UPDATE, "{}", "Missing 'update_info' in request body"},
    {UPDATE_VERB_UPDATE, "{\"update_info\": \"x\"}", "'update_info' must be an object or a list"},
    {UPDATE_VERB_UPDATE, "{\"update_info\": {}}", "missing field 'names'"},
    {UPDATE_VERB_UPDATE, "{\"update_info\": {\"names\": []}}", "missing field 'dtype_names'"},
    {UPDATE_VERB_UPDATE, TENSORS("{}", "[]", "[]"), "'names' must be a list"},
    {UPDATE_VERB_UPDATE, TENSORS("[]", "[]", "[]"), NULL},
    {UPDATE_VERB_UPDATE, UPDATE_BOTH, NULL},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[]", "[[2,3]]"),
     "`dtype_names` should be of the same size as `names`: got 0 and 1"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float32\"]", "[]"),
     "`shapes` should be of the same size as `names`: got 0 and 1"},
    {UPDATE_VERB_UPDATE, TENSORS("[5]", "[\"float32\"]", "[[1]]"), "names[0] is not a string"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"\"]", "[\"float32\"]", "[[1]]"), "names[0] is empty"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float8\"]", "[[2,3]]"),
     "'a.weight' has the unknown dtype float8"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[null]", "[[2,3]]"), "(not a string)"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float32\"]", "[6]"),
     "its shape is not a list"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float32\"]", "[[2,-3]]"),
     "not an integer of at least 0"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float32\"]", "[[2,3.0]]"),
     "not an integer of at least 0"},
    {UPDATE_VERB_UPDATE, TENSORS("[\"a.weight\"]", "[\"float32\"]", "[[1,1,1,1,1,1,1,2,3]]"),
     "too many dimensions"},
    {UPDATE_VERB_UPDATE,
     TENSORS("[\"a.weight\"]", "[\"float32\"]", "[[4611686018427387904,4611686018427387904]]"),
     "is too large"},
    {UPDATE_VERB_UPDATE,
     TENSORS("[\"a.weight\",\"b.weight\",\"a.weight\"]", "[\"float32\",\"bfloat16\",\"float32\"]",
             "[[2,3],[5],[2,3]]"),
     "'a.weight' is listed twice"},
    {UPDATE_VERB_UPDATE,
     TENSORS("[\"x\",\"a.weight\",\"y\"]", "[\"float32\",\"float32\",\"float32\"]",
             "[[1],[2,3],[1]]"),
     "not in the model: 'x', 'y'"},
    {UPDATE_VERB_UPDATE, ONE("\"packed\": 1"), "'packed' must be true or false"},
    {UPDATE_VERB_UPDATE, ONE("\"packed_buffer_size_bytes\": 0"),
     "'packed_buffer_size_bytes' must be"},
    {UPDATE_VERB_UPDATE, ONE("\"packed_num_buffers\": \"2\""), "'packed_num_buffers' must be"},
    {UPDATE_VERB_UPDATE, ONE("\"packed\": true, \"packed_num_buffers\": 2"), NULL},
    {UPDATE_VERB_UPDATE, ONE("\"is_checkpoint_format\": \"whatever\""), NULL},
    {UPDATE_VERB_FINISH, "", NULL},
    {UPDATE_VERB_FINISH, "{}", NULL},
    {UPDATE_VERB_FINISH, "{\"weight_version\": null}", NULL},
    {UPDATE_VERB_FINISH, "{\"weight_version\": 5}", "'weight_version' must be a string"},
    {UPDATE_VERB_FINISH, "[]", "must be an object"},
    {UPDATE_VERB_ABORT, "", NULL},
    {UPDATE_VERB_SET_VERSION, "", "Invalid JSON format"},
    {UPDATE_VERB_SET_VERSION, "{}", "Missing 'new_version' in request body"},
    {UPDATE_VERB_SET_VERSION, "{\"new_version\": 5}", "'new_version' must be a string"},
    {UPDATE_VERB_SET_VERSION, VERSION_OK, NULL},
    {UPDATE_VERB_SET_VERSION, "{\"weight_version\": \"v7\"}", NULL},
};

START_TEST(body)
{
    go_to(UPDATE_STATE_OPEN);
    lk_status_t st = check(bodies[_i].verb, bodies[_i].spec);
    if (bodies[_i].text == NULL) {
        ck_assert_msg(st == LK_OK, "%s: %s", bodies[_i].spec, err.text);
    } else {
        ck_assert_msg(st == LK_ERR_INVALID, "%s: accepted", bodies[_i].spec);
        ck_assert_msg(strstr(err.text, bodies[_i].text) != NULL, "%s: %s", bodies[_i].spec,
                      err.text);
    }
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_OPEN);
    ck_assert_uint_eq(sink->begins, 1);
    ck_assert_uint_eq(sink->n_plan, 0);
}
END_TEST

START_TEST(backend_fields_are_checked)
{
    go_to(UPDATE_STATE_OPEN);
    ck_assert_int_eq(check(UPDATE_VERB_UPDATE, ONE("\"bad\": 1")), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "Invalid update_info for fake: unknown field 'bad'");
}
END_TEST

START_TEST(many_offenders_are_counted)
{
    char spec[30000];
    size_t n = 0;
    n += (size_t)snprintf(spec + n, sizeof spec - n, "{\"update_info\": {\"names\": [");
    for (int i = 0; i < 200; i++) {
        n += (size_t)snprintf(spec + n, sizeof spec - n, "%s\"layer.%d\"", i > 0 ? "," : "", i);
    }
    n += (size_t)snprintf(spec + n, sizeof spec - n, "], \"dtype_names\": [");
    for (int i = 0; i < 200; i++) {
        n += (size_t)snprintf(spec + n, sizeof spec - n, "%s\"fp4\"", i > 0 ? "," : "");
    }
    n += (size_t)snprintf(spec + n, sizeof spec - n, "], \"shapes\": [");
    for (int i = 0; i < 200; i++) {
        n += (size_t)snprintf(spec + n, sizeof spec - n, "%s[1]", i > 0 ? "," : "");
    }
    snprintf(spec + n, sizeof spec - n, "]}}");
    ck_assert_int_eq(check(UPDATE_VERB_UPDATE, spec), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "'layer.0' has the unknown dtype fp4; 'layer.1' has"));
    const char *more = strstr(err.text, "; and ");
    ck_assert_ptr_nonnull(more);
    ck_assert_ptr_nonnull(strstr(more, " more"));
}
END_TEST

START_TEST(list_per_rank)
{
    go_to(UPDATE_STATE_OPEN);
    ck_ok(post(
        UPDATE_VERB_UPDATE,
        "{\"update_info\": [{\"names\": [], \"dtype_names\": [], \"shapes\": []}, {\"names\": "
        "[\"b.weight\"], \"dtype_names\": [\"bfloat16\"], \"shapes\": [[5]], \"packed\": true, "
        "\"packed_buffer_size_bytes\": 77}]}"));
    ck_assert_uint_eq(script.last.n_tensors, 1);
    ck_assert_str_eq(script.last.tensors[0].name, "b.weight");
    ck_assert(script.last.packed);
    ck_assert_uint_eq(script.last.packed_buffer_size_bytes, 77);
    ck_ok(update_session_test(session, &err));
    ck_assert_int_eq(check(UPDATE_VERB_UPDATE, "{\"update_info\": [{}]}"), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "'update_info' is a list of 1, but there are 2 ranks");
}
END_TEST

START_TEST(packing_of_init_is_overridden_by_update)
{
    call(UPDATE_VERB_INIT,
         "{\"init_info\": {\"packed\": true, \"packed_buffer_size_bytes\": 4096}}");
    call(UPDATE_VERB_START, NULL);
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert(script.last.packed);
    ck_assert_uint_eq(script.last.packed_buffer_size_bytes, 4096);
    ck_assert_uint_eq(script.last.packed_num_buffers, 2);
    call(UPDATE_VERB_UPDATE, ONE("\"packed\": false, \"packed_num_buffers\": 3"));
    ck_assert(!script.last.packed);
    ck_assert_uint_eq(script.last.packed_num_buffers, 3);
    call(UPDATE_VERB_ABORT, NULL);
    call(UPDATE_VERB_INIT, INIT_OK);
    call(UPDATE_VERB_START, NULL);
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert(!script.last.packed);
    ck_assert_uint_eq(script.last.packed_buffer_size_bytes, 1ull << 30);
}
END_TEST

/* A post of the text that was checked last uses what the check has read, and of no other. */
START_TEST(what_is_posted_counts_not_what_was_checked)
{
    static const char *const packed = "{\"init_info\": {\"packed\": true}}";
    go_to(UPDATE_STATE_OPEN);
    ck_ok(check(UPDATE_VERB_UPDATE, UPDATE_BOTH));
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert_uint_eq(script.last.n_tensors, 1);
    for (int i = 0; i < 2; i++) { /* the second time nothing is left of the check */
        ck_ok(i == 0 ? check(UPDATE_VERB_UPDATE, UPDATE_BOTH) : LK_OK);
        call(UPDATE_VERB_UPDATE, UPDATE_BOTH);
        ck_assert_uint_eq(script.last.n_tensors, 2);
    }
    ck_ok(check(UPDATE_VERB_UPDATE, UPDATE_A));
    ck_assert_int_lt(check(UPDATE_VERB_UPDATE, "{\"update_info\": {}}"), 0);
    call(UPDATE_VERB_ABORT, NULL);
    ck_ok(check(UPDATE_VERB_UPDATE, UPDATE_A)); /* under other defaults */
    call(UPDATE_VERB_INIT, packed);
    call(UPDATE_VERB_START, NULL);
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert(script.last.packed);
}
END_TEST

/* What was read of a text stays for the next update of the same text, but not for another place or
 * other defaults; and what may have changed is asked again. */
START_TEST(the_same_text_is_read_once)
{
    static const char *const lists =
        "{\"update_info\": [{\"names\": [\"a.weight\"], \"dtype_names\": [\"float32\"], "
        "\"shapes\": [[2, 3]]}, {\"names\": [\"b.weight\"], \"dtype_names\": [\"bfloat16\"], "
        "\"shapes\": [[5]]}]}";
    const tensor_desc_t *read = NULL;
    go_to(UPDATE_STATE_OPEN);
    for (int i = 0; i < 3; i++) {
        ck_ok(check(UPDATE_VERB_UPDATE, lists));
        call(UPDATE_VERB_UPDATE, lists);
        ck_assert(i == 0 || script.last.tensors == read);
        ck_assert_str_eq(script.first, "b.weight");
        read = script.last.tensors;
        call(UPDATE_VERB_FINISH, NULL);
        call(UPDATE_VERB_START, NULL);
    }
    script.refuses = true;
    ck_assert_int_eq(check(UPDATE_VERB_UPDATE, lists), LK_ERR_INVALID);
    script.refuses = false;
    /* in the middle of an update another text, and then the first again */
    ck_ok(check(UPDATE_VERB_UPDATE, lists));
    ck_ok(post(UPDATE_VERB_UPDATE, lists));
    ck_ok(check(UPDATE_VERB_UPDATE, UPDATE_BOTH));
    ck_ok(update_session_test(session, &err));
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, true, &err));
    call(UPDATE_VERB_UPDATE, lists);
    ck_assert_str_eq(script.first, "b.weight");
    ck_ok(check(UPDATE_VERB_UPDATE, lists));
    call(UPDATE_VERB_UPDATE, lists);
    /* the same rank in the other place */
    update_session_reset(session);
    update_session_seat(session, 0, 2);
    go_to(UPDATE_STATE_OPEN);
    ck_ok(check(UPDATE_VERB_UPDATE, lists));
    call(UPDATE_VERB_UPDATE, lists);
    ck_assert_str_eq(script.first, "a.weight");
}
END_TEST

/* ---- failures ---- */

START_TEST(failed_init_can_be_repeated)
{
    script.init = LK_ERR_TIMEOUT;
    ck_ok(post(UPDATE_VERB_INIT, INIT_OK));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_TIMEOUT);
    ck_ok(update_session_outcome(session, UPDATE_VERB_INIT, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    script.init = LK_OK;
    call(UPDATE_VERB_INIT, INIT_OK);
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
    /* another rank's failure undoes this one's success */
    ck_ok(post(UPDATE_VERB_INIT, INIT_OK));
    ck_ok(update_session_test(session, &err));
    ck_ok(update_session_outcome(session, UPDATE_VERB_INIT, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    ck_assert(script.aborted);
}
END_TEST

START_TEST(failure_before_the_first_byte_leaves_the_weights_clean)
{
    go_to(UPDATE_STATE_OPEN);
    script.update = LK_ERR_PEER;
    ck_ok(post(UPDATE_VERB_UPDATE, UPDATE_A));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_PEER);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    ck_assert(!update_session_touched(session));
}
END_TEST

START_TEST(dirty_until_a_complete_update)
{
    go_to(UPDATE_STATE_OPEN);
    script.update = LK_ERR_PEER;
    script.deliver = 1;
    ck_ok(post(UPDATE_VERB_UPDATE, UPDATE_A));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_PEER);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    ck_assert(update_session_touched(session));

    /* a part of the model does not clean it */
    script.update = LK_OK;
    call(UPDATE_VERB_INIT, INIT_OK);
    call(UPDATE_VERB_START, NULL);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert_int_eq(post(UPDATE_VERB_FINISH, ""), LK_ERR_STATE);
    ck_assert_ptr_nonnull(strstr(err.text, "every tensor of the model. Missing: b.weight"));
    ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, false, &err));
    ck_assert(update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 0);
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);

    /* all of it does, in as many calls as it likes */
    call(UPDATE_VERB_START, NULL);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    script.deliver = 2;
    call(UPDATE_VERB_UPDATE, UPDATE_BOTH);
    call(UPDATE_VERB_FINISH, "");
    ck_assert(!update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 1);
}
END_TEST

START_TEST(other_rank_failed)
{
    go_to(UPDATE_STATE_OPEN);
    script.deliver = 1;
    ck_ok(post(UPDATE_VERB_UPDATE, UPDATE_A));
    ck_ok(update_session_test(session, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_OPEN);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    ck_assert(update_session_touched(session));
    ck_assert(script.aborted);
}
END_TEST

START_TEST(finish_that_another_rank_refuses)
{
    go_to(UPDATE_STATE_OPEN);
    ck_ok(post(UPDATE_VERB_FINISH, ""));
    ck_ok(update_session_test(session, &err));
    ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, false, &err));
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
    ck_assert(update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 0);
}
END_TEST

START_TEST(aborted_session_stays_dirty)
{
    go_to(UPDATE_STATE_OPEN);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    call(UPDATE_VERB_ABORT, "");
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
    ck_assert(update_session_touched(session));
    call(UPDATE_VERB_ABORT, "");
    ck_assert(update_session_touched(session));
}
END_TEST

START_TEST(partial_update_of_clean_weights_commits)
{
    go_to(UPDATE_STATE_OPEN);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    call(UPDATE_VERB_UPDATE, UPDATE_NONE);
    ck_assert(update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 0);
    call(UPDATE_VERB_FINISH, "{\"weight_version\": \"step-3\"}");
    ck_assert(!update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 1);
}
END_TEST

START_TEST(failed_commit_says_so)
{
    go_to(UPDATE_STATE_OPEN);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_ok(post(UPDATE_VERB_FINISH, ""));
    ck_ok(update_session_test(session, &err));
    sink->commit_status = LK_ERR_NO_MEMORY;
    ck_assert_int_eq(update_session_outcome(session, UPDATE_VERB_FINISH, true, &err),
                     LK_ERR_NO_MEMORY);
    ck_assert(update_session_touched(session));
}
END_TEST

START_TEST(cancel_gives_the_reason)
{
    update_session_cancel(session, "nothing is posted");
    go_to(_i == 0 ? UPDATE_STATE_INITIALISING : UPDATE_STATE_RECEIVING);
    update_session_cancel(session, "deadline of 30.0 s passed");
    update_session_cancel(session, "deadline of 30.0 s passed");
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_CANCELED);
    ck_assert_str_eq(err.text, "deadline of 30.0 s passed");
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_UNCONFIGURED);
    script.init = script.update = LK_OK;
    call(UPDATE_VERB_INIT, INIT_OK);
    call(UPDATE_VERB_START, "");
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    call(UPDATE_VERB_FINISH, "");
}
END_TEST

START_TEST(progress_is_the_engines)
{
    wte_progress_t progress;
    update_session_progress(session, &progress);
    ck_assert_uint_eq(progress.tensors_total, 0);
    go_to(UPDATE_STATE_RECEIVING);
    update_session_progress(session, &progress);
    ck_assert_str_eq(progress.waiting_for, "the script");
    ck_assert_uint_eq(progress.tensors_total, 1);
}
END_TEST

/* ---- a sink of two sets ---- */

/* Whatever a session brought and however it ended: the next one may bring what it likes. */
START_TEST(two_sets_are_never_touched)
{
    go_to(UPDATE_STATE_OPEN);
    script.update = LK_ERR_PEER;
    script.deliver = 1;
    ck_ok(post(UPDATE_VERB_UPDATE, UPDATE_A));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_PEER);
    ck_ok(update_session_outcome(session, UPDATE_VERB_UPDATE, false, &err));
    ck_assert(!update_session_touched(session));
    script.update = LK_OK;
    for (int i = 0; i < 2; i++) {
        call(UPDATE_VERB_INIT, INIT_OK);
        call(UPDATE_VERB_START, NULL);
        script.deliver = 1;
        call(UPDATE_VERB_UPDATE, UPDATE_A);
        ck_ok(post(UPDATE_VERB_FINISH, ""));
        update_session_prepare(session);
        ck_ok(update_session_test(session, &err));
        ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, i > 0, &err)); /* other rank */
        ck_assert(!update_session_touched(session));
        ck_assert_uint_eq(sink->commits, (size_t)i);
        ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
    }
    call(UPDATE_VERB_START, NULL);
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    call(UPDATE_VERB_ABORT, NULL);
    ck_assert(!update_session_touched(session));
    ck_assert_uint_eq(sink->commits, 1);
}
END_TEST

START_TEST(a_commit_is_prepared_in_slices)
{
    go_to(UPDATE_STATE_OPEN);
    sink->prepares = 3;
    ck_ok(post(UPDATE_VERB_FINISH, ""));
    update_session_prepare(session);
    uint64_t moves = 0;
    for (int i = 0; i < 3; i++) {
        wte_progress_t progress;
        ck_assert_int_eq(update_session_state(session), UPDATE_STATE_PREPARING);
        ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
        update_session_progress(session, &progress);
        ck_assert_uint_ne(progress.moves, moves);
        moves = progress.moves;
    }
    ck_assert_uint_eq(sink->commits, 0);
    ck_ok(update_session_test(session, &err));
    ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, true, &err));
    ck_assert_uint_eq(sink->commits, 1);
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
}
END_TEST

START_TEST(a_preparation_can_be_cancelled)
{
    go_to(UPDATE_STATE_OPEN);
    sink->prepares = 3;
    ck_ok(post(UPDATE_VERB_FINISH, ""));
    update_session_prepare(session);
    ck_assert_int_eq(update_session_test(session, &err), LK_INPROGRESS);
    update_session_cancel(session, "the caller left");
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_CANCELED);
    ck_assert_str_eq(err.text, "the caller left");
    ck_ok(update_session_outcome(session, UPDATE_VERB_FINISH, false, &err));
    ck_assert_uint_eq(sink->commits, 0);
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_READY);
    sink->prepares = 0;
    call(UPDATE_VERB_START, NULL); /* the transfer engine is as good as before */
    script.deliver = 1;
    call(UPDATE_VERB_UPDATE, UPDATE_A);
    ck_assert_int_eq(update_session_state(session), UPDATE_STATE_OPEN);
}
END_TEST

static void setup_two_sets(void)
{
    two_sets = true;
    setup();
}

START_TEST(names_of_states_and_verbs)
{
    ck_assert_str_eq(update_state_name(UPDATE_STATE_RECEIVING), "RECEIVING");
    ck_assert_str_eq(update_verb_name(UPDATE_VERB_FINISH), "finish_weight_update");
    ck_assert_str_eq(update_verb_name(99), "?");
    update_session_destroy(NULL);
    update_session_t *none = NULL;
    update_session_destroy(&none);
}
END_TEST

/* The rank's place, and how many there are, are those of the newest group epoch. */
START_TEST(seated_anew)
{
    static const char *const three = "{\"init_info\": {\"world_size\": 4, \"rank_offset\": 1}}";
    update_session_seat(session, 0, 1);
    go_to(UPDATE_STATE_OPEN);
    ck_assert_int_eq(check(UPDATE_VERB_UPDATE, "{\"update_info\": [{}, {}]}"), LK_ERR_INVALID);
    ck_assert_str_eq(err.text, "'update_info' is a list of 2, but there are 1 ranks");
    update_session_reset(session);
    /* a trainer that has not heard of it waits for the others, and is told */
    script.init = LK_ERR_TIMEOUT;
    ck_ok(post(UPDATE_VERB_INIT, three));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_TIMEOUT);
    ck_assert_str_eq(err.text, "scripted; init_info's world_size counts on 3 ranks, this cluster "
                               "has 1 now");
    ck_ok(update_session_outcome(session, UPDATE_VERB_INIT, false, &err));
    update_session_seat(session, 2, 3);
    ck_ok(post(UPDATE_VERB_INIT, three));
    ck_assert_int_eq(update_session_test(session, &err), LK_ERR_TIMEOUT);
    ck_assert_str_eq(err.text, "scripted");
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("update_session");
    TCase *tc = tcase_create("session");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, state_by_verb, 0, LK_ARRAY_LEN(table));
    tcase_add_test(tc, not_configured);
    tcase_add_loop_test(tc, body, 0, LK_ARRAY_LEN(bodies));
    tcase_add_test(tc, backend_fields_are_checked);
    tcase_add_test(tc, many_offenders_are_counted);
    tcase_add_test(tc, list_per_rank);
    tcase_add_test(tc, packing_of_init_is_overridden_by_update);
    tcase_add_test(tc, what_is_posted_counts_not_what_was_checked);
    tcase_add_test(tc, the_same_text_is_read_once);
    tcase_add_test(tc, failed_init_can_be_repeated);
    tcase_add_test(tc, failure_before_the_first_byte_leaves_the_weights_clean);
    tcase_add_test(tc, dirty_until_a_complete_update);
    tcase_add_test(tc, other_rank_failed);
    tcase_add_test(tc, finish_that_another_rank_refuses);
    tcase_add_test(tc, aborted_session_stays_dirty);
    tcase_add_test(tc, partial_update_of_clean_weights_commits);
    tcase_add_test(tc, failed_commit_says_so);
    tcase_add_loop_test(tc, cancel_gives_the_reason, 0, 2);
    tcase_add_test(tc, progress_is_the_engines);
    tcase_add_test(tc, names_of_states_and_verbs);
    suite_add_tcase(suite, tc);
    TCase *two = tcase_create("two sets");
    tcase_add_checked_fixture(two, setup_two_sets, teardown);
    tcase_add_test(two, two_sets_are_never_touched);
    tcase_add_test(two, a_commit_is_prepared_in_slices);
    tcase_add_test(two, a_preparation_can_be_cancelled);
    tcase_add_test(tc, seated_anew);
    suite_add_tcase(suite, two);
    return suite;
}
