/* One suite over every weight transfer engine: loop index = backend. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/wte_rig.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static const char *const backends[] = {"mem", "shm", "tcp"};
#define N_BACKENDS ((int)LK_ARRAY_LEN(backends))

static wte_rig_t rig;
static rig_tensors_t model;
static lk_error_t err;
static lk_prng_t prng;

#define SESSION 0x1122334455667788ull

static void small_model(void)
{
    rig_tensors_add(&model, LK_DTYPE_F32, 30, &prng);
    rig_tensors_add(&model, LK_DTYPE_U8, 3, &prng);
    rig_tensors_add(&model, LK_DTYPE_BF16, 0, &prng);
    rig_tensors_add(&model, LK_DTYPE_BF16, 21, &prng);
    rig_tensors_add(&model, LK_DTYPE_F64, 1, &prng);
    rig_tensors_add(&model, LK_DTYPE_I8, 0, &prng);
}

static void setup(void)
{
    memset(&model, 0, sizeof model);
    lk_prng_seed(&prng, test_seed("weight_transfer_engine"));
    err = LK_ERROR_INIT;
}

static void teardown(void)
{
    rig_fini(&rig);
    rig_tensors_fini(&model);
}

static void open_small(int backend)
{
    small_model();
    rig_init(&rig, backends[backend], 1, 1, 1 << 16, &model);
}

/* Rank 0 in the middle of an update with a trainer that is a bare stream. */
static byte_stream_t *open_by_hand(int backend, const wte_update_t *update)
{
    open_small(backend);
    rig_post_init(&rig, 0);
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    rig_welcome(&rig, stream, SESSION);
    rig_begin(&rig, NULL, update);
    uint8_t go[TRANSFER_FRAME_SIZE];
    transfer_frame_t frame;
    rig_read(&rig, stream, go, sizeof go);
    ck_ok_text(transfer_frame_decode(go, &frame, &err), err);
    ck_assert_int_eq(frame.kind, TRANSFER_GO);
    ck_assert_uint_eq(frame.session, SESSION);
    return stream;
}

/* After whatever happened, a new trainer and a whole update. */
static void expect_recovery(void)
{
    rig_trainer_dies(&rig);
    rig_trainer_starts(&rig);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, true, 50);
    rig_begin(&rig, &model, &update);
    rig_run(&rig);
    rig_expect_equal(&rig, 0, &model);
}

/* ---- registry and init_info ---- */

START_TEST(registry)
{
    ck_assert_str_eq(wte_names(), "disk, mem, shm, tcp");
    for (int i = 0; i < N_BACKENDS; i++) {
        ck_assert_str_eq(wte_find(backends[i])->name, backends[i]);
        ck_assert_ptr_nonnull(strstr(wte_names(), backends[i]));
    }
    ck_assert_ptr_null(wte_find("carrier-pigeon"));
}
END_TEST

static const struct {
    const char *backend, *key, *value; /* JSON value set over a good init_info; NULL deletes */
    const char *text;                  /* NULL: accepted */
} init_rows[] = {
    {"tcp", "x", "1", "Invalid init_info for tcp: unknown field 'x'"},
    {"mem", "x", "1", "Invalid init_info for mem: unknown field 'x'"},
    {"tcp", "master_address", NULL, "Invalid init_info for tcp: missing field 'master_address'"},
    {"tcp", "master_address", "7", "'master_address' must be a string"},
    {"tcp", "master_address", "\"\"", "'master_address' must be a string of 1 to 255 bytes"},
    {"tcp", "master_port", "null", "missing field 'master_port'"},
    {"tcp", "master_port", "0", "'master_port' must be an integer from 1 to 65535"},
    {"tcp", "master_port", "65536", "'master_port' must be an integer"},
    {"tcp", "master_port", "\"80\"", "'master_port' must be an integer"},
    {"tcp", "session_token", NULL, "missing field 'session_token'"},
    {"shm", "x", "1", "Invalid init_info for shm: unknown field 'x'"},
    {"shm", "segment", NULL, "Invalid init_info for shm: missing field 'segment'"},
    {"shm", "segment", "\"\"", "'segment' must be a string of 1 to 100 bytes"},
    {"shm", "bytes", NULL, "missing field 'bytes'"},
    {"shm", "bytes", "1048576", "'bytes' must be an integer from 2097152"},
    {"shm", "bytes", "2097153", "'bytes' must be a multiple of 1048576, not 2097153"},
    {"shm", "bytes", "2e6", "'bytes' must be an integer"},
    {"shm", "world_size", "2", NULL},
    {"shm", "packed", "true", NULL},
    {"shm", "connections", "1", "unknown field 'connections'"},
    {"mem", "session_token", "\"\"", "'session_token' must be a string"},
    {"mem", "trainer", NULL, "Invalid init_info for mem: missing field 'trainer'"},
    {"tcp", "connections", "0", "'connections' must be an integer from 1 to 8"},
    {"tcp", "connections", "9", "'connections' must be an integer from 1 to 8"},
    {"tcp", "connections", "2", NULL},
    {"tcp", "rank_offset", "1", NULL},
    {"tcp", "rank_offset", "-1", "'rank_offset' must be an integer"},
    {"tcp", "world_size", "2", NULL},
    {"tcp", "world_size", "1", "'world_size' must be an integer from 2"},
    {"tcp", "packed", "true", NULL},
    {"tcp", "packed", "null", NULL},
    {"tcp", "packed", "\"yes\"", "'packed' must be true or false"},
    {"mem", "packed_buffer_size_bytes", "0",
     "'packed_buffer_size_bytes' must be an integer from 1"},
    {"mem", "packed_num_buffers", "2", NULL},
    {"mem", "is_checkpoint_format", "[]", NULL},
    {"tcp", "nccl_unique_id_b64", "\"AAAA\"", "unknown field 'nccl_unique_id_b64'"},
};

START_TEST(init_info)
{
    small_model();
    rig_init(&rig, init_rows[_i].backend, 1, 1, 1 << 16, &model);
    json_t *info = rig_init_info(&rig, RIG_TOKEN);
    if (init_rows[_i].value != NULL) {
        json_object_set_new(info, init_rows[_i].key,
                            json_loads(init_rows[_i].value, JSON_DECODE_ANY, NULL));
    } else {
        json_object_del(info, init_rows[_i].key);
    }
    lk_status_t st = rig.ops->init_check(info, &rig.ctx[0], &err);
    if (init_rows[_i].text == NULL) {
        ck_ok_text(st, err);
    } else {
        ck_assert_int_eq(st, LK_ERR_INVALID);
        ck_assert_msg(strstr(err.text, init_rows[_i].text) != NULL, "%s", err.text);
        ck_assert_int_eq(rig.ops->init_post(rig.state[0], info, &rig.ctx[0], &err), LK_ERR_INVALID);
        ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);
    }
    json_decref(info);
}
END_TEST

START_TEST(world_size_must_hold_all_ranks)
{
    small_model();
    rig_init(&rig, "tcp", 3, 1, 1 << 16, &model);
    json_t *info = rig_init_info(&rig, RIG_TOKEN);
    json_object_set_new(info, "rank_offset", json_integer(1));
    json_object_set_new(info, "world_size", json_integer(4));
    ck_ok_text(rig.ops->init_check(info, &rig.ctx[0], &err), err);
    json_object_set_new(info, "world_size", json_integer(3));
    ck_assert_int_eq(rig.ops->init_check(info, &rig.ctx[0], &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "world_size is 3"));
    json_decref(info);
}
END_TEST

/* ---- order of operations, abort ---- */

START_TEST(order_of_operations)
{
    open_small(_i);
    wte_update_t update = rig_update(&model, false, 1);
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    update.update_info = info;
    weight_sink_t sink = mem_sink(rig.sink[0]);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_STATE);
    ck_assert_int_eq(rig.ops->update_check(rig.state[0], &update, &err), LK_ERR_STATE);
    ck_assert_ptr_nonnull(strstr(err.text, "not initialized"));
    ck_assert_int_eq(rig.ops->update_post(rig.state[0], &update, &sink, &err), LK_ERR_STATE);
    rig_connect(&rig);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_STATE);
    json_object_set_new(info, "surprise", json_true());
    ck_assert_int_eq(rig.ops->update_check(rig.state[0], &update, &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "unknown field 'surprise'"));
    json_decref(info);
}
END_TEST

START_TEST(abort_in_every_state)
{
    open_small(_i);
    wte_update_t update = rig_update(&model, false, 1);
    rig.ops->abort(rig.state[0]); /* zeroed */
    rig.ops->abort(rig.state[0]);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);

    rig_post_init(&rig, 0); /* opening */
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    rig.ops->abort(rig.state[0]);
    rig.ops->abort(rig.state[0]);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_CANCELED);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);
    byte_stream_destroy(&stream);

    rig_connect(&rig); /* idle: an abort keeps the connection */
    rig.ops->abort(rig.state[0]);
    rig_begin(&rig, &model, &update);
    rig_run(&rig);
    rig_expect_equal(&rig, 0, &model);

    rig_begin(&rig, &model, &update); /* receiving */
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
    rig.ops->abort(rig.state[0]);
    rig.ops->abort(rig.state[0]);
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_CANCELED);
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_STATE);
    expect_recovery();
}
END_TEST

/* ---- whole updates ---- */

/* bit 0 packed, bit 1 direct, bit 2 three ranks, bit 3 three lanes, above: backend */
START_TEST(moves_every_byte)
{
    bool packed = _i & 1, direct = _i & 2;
    uint32_t ranks = _i & 4 ? 3 : 1, lanes = _i & 8 ? 3 : 1;
    small_model();
    for (int i = 0; i < 40; i++) {
        lk_dtype_t dtype = (lk_dtype_t)lk_prng_below(&prng, LK_DTYPE_COUNT);
        rig_tensors_add(&model, dtype, lk_prng_below(&prng, 3000), &prng);
    }
    rig_tensors_add(&model, LK_DTYPE_BF16, (3u << 20) / 2 + 1, &prng); /* over any bucket; chunks */
    rig_tensors_add(&model, LK_DTYPE_F32, TRANSFER_CHUNK_BYTES / 4, &prng);
    rig_init(&rig, backends[_i >> 4], ranks, lanes, 100000, &model);
    for (uint32_t r = 0; r < ranks; r++) {
        rig.sink[r]->direct = direct;
    }
    rig_connect(&rig);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < model.n; i++) {
            for (size_t k = 0; k < rig.sink[0]->bytes[i]; k += 13) {
                ((uint8_t *)model.data[i])[k] ^= (uint8_t)(round + 1);
            }
        }
        wte_update_t update = rig_update(&model, packed, 1 + lk_prng_below(&prng, 100000));
        rig_begin(&rig, &model, &update);
        rig_run(&rig);
        wte_progress_t progress;
        for (uint32_t r = 0; r < ranks; r++) {
            rig_expect_equal(&rig, r, &model);
            rig.ops->progress(rig.state[r], &progress);
            ck_assert_uint_eq(progress.tensors_done, model.n);
            ck_assert_uint_eq(progress.tensors_total, model.n);
            ck_assert_uint_eq(progress.bytes_done, progress.bytes_total);
            ck_assert_str_eq(progress.waiting_for, "");
            weight_sink_t a = mem_sink(rig.sink[0]), b = mem_sink(rig.sink[r]);
            ck_assert(digest_equal(a.ops->digest(a.ctx), b.ops->digest(b.ctx)));
        }
        ck_assert_uint_eq(sender_bytes(rig.sender), progress.bytes_total * ranks);
    }
}
END_TEST

START_TEST(no_tensors_at_all)
{
    open_small(_i);
    rig_connect(&rig);
    rig_tensors_t none = {.n = 0};
    wte_update_t update = rig_update(&none, true, 10);
    rig_begin(&rig, &none, &update);
    rig_run(&rig);
    ck_assert_uint_eq(rig.sink[0]->tensors, 0);
}
END_TEST

START_TEST(memory_is_bounded_by_the_bucket)
{
    small_model();
    for (int i = 0; i < 64; i++) {
        rig_tensors_add(&model, LK_DTYPE_U8, 64 << 10, &prng);
    }
    rig_init(&rig, backends[_i], 1, 1, 1 << 16, &model);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, true, 256 << 10);
    struct mallinfo2 before = mallinfo2();
    for (int round = 0; round < 5; round++) {
        rig_begin(&rig, &model, &update);
        rig_run(&rig);
    }
    struct mallinfo2 after = mallinfo2();
    size_t grown = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    ck_assert_msg(grown < (256 << 10) + (64 << 10) + (64 << 10), "%zu bytes", grown);
}
END_TEST

START_TEST(work_per_call_is_bounded)
{
    for (int i = 0; i < 40; i++) {
        rig_tensors_add(&model, LK_DTYPE_U8, 1 << 20, &prng);
    }
    rig_init(&rig, backends[_i], 1, 1, 64u << 20, &model);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    uint64_t done = 0;
    for (lk_status_t st = LK_INPROGRESS, sent = LK_INPROGRESS; st != LK_OK || sent != LK_OK;) {
        for (int i = 0; i < 8 && sent != LK_OK; i++) {
            sent = sender_step(rig.sender, &err);
            ck_assert_msg(sent >= 0, "%s", err.text);
        }
        if (st != LK_OK) {
            st = rig.ops->update_test(rig.state[0], &err);
            ck_assert_msg(st >= 0, "%s", err.text);
        }
        wte_progress_t progress;
        rig.ops->progress(rig.state[0], &progress);
        ck_assert_uint_le(progress.bytes_done - done, (8u << 20) + (1u << 20));
        done = progress.bytes_done;
    }
    ck_assert_uint_eq(done, 40u << 20);
}
END_TEST

START_TEST(sink_error_ends_the_update)
{
    open_small(_i);
    rig_connect(&rig);
    rig.sink[0]->fail_at = "tensor.3";
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    lk_status_t rank = LK_INPROGRESS, sender = LK_INPROGRESS;
    lk_error_t sent = LK_ERROR_INIT;
    while (rank == LK_INPROGRESS || sender == LK_INPROGRESS) {
        rank = rank == LK_INPROGRESS ? rig.ops->update_test(rig.state[0], &err) : rank;
        sender = sender == LK_INPROGRESS ? sender_step(rig.sender, &sent) : sender;
    }
    ck_assert_int_eq(rank, LK_ERR_INTERNAL);
    ck_assert_ptr_nonnull(strstr(err.text, "the sink refuses 'tensor.3'"));
    ck_assert_ptr_nonnull(strstr(err.text, "bucket 4 of 6"));
    /* and the trainer hears why */
    ck_assert_int_eq(sender, LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(sent.text, "rank 0"));
    ck_assert_ptr_nonnull(strstr(sent.text, "the sink refuses 'tensor.3'"));
    ck_assert(!sender_usable(rig.sender));
    rig.sink[0]->fail_at = NULL;
    expect_recovery();
}
END_TEST

/* ---- trainers that die ---- */

START_TEST(trainer_is_not_there_yet)
{
    open_small(_i);
    rig_trainer_dies(&rig);
    rig_post_init(&rig, 0);
    for (int i = 0; i < 50; i++) { /* refused again and again, and still trying */
        ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_INPROGRESS);
        rig.now_ns += 200 * LK_MS_NS;
    }
    rig_trainer_starts(&rig);
    byte_stream_t *stream = NULL;
    while (stream == NULL) {
        rig.now_ns += LK_MS_NS;
        ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_INPROGRESS);
        stream = rig_accept(&rig);
    }
    rig_welcome(&rig, stream, SESSION);
    byte_stream_destroy(&stream);
}
END_TEST

START_TEST(trainer_never_comes)
{
    open_small(_i);
    rig_trainer_dies(&rig);
    rig_post_init(&rig, 0);
    lk_status_t st = LK_INPROGRESS;
    while (st == LK_INPROGRESS) {
        st = rig.ops->init_test(rig.state[0], &err);
        rig.now_ns += LK_SECOND_NS;
    }
    ck_assert_int_eq(st, LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "not reachable for 3"));
    ck_assert_ptr_nonnull(strstr(err.text, rig.tcp ? "127.0.0.1:" : rig.shm ? "@rig-" : "'rig'"));
    expect_recovery();
}
END_TEST

START_TEST(trainer_dies_in_hello)
{
    open_small(_i);
    rig_post_init(&rig, 0);
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    byte_stream_destroy(&stream);
    lk_status_t st;
    while ((st = rig.ops->init_test(rig.state[0], &err)) == LK_INPROGRESS) {
        continue;
    }
    ck_assert_int_eq(st, LK_ERR_PEER);
    expect_recovery();
}
END_TEST

START_TEST(trainer_says_nothing_in_hello)
{
    open_small(_i);
    rig_post_init(&rig, 0);
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_INPROGRESS);
    rig.now_ns += RIG_LIMIT_NS;
    lk_status_t st = rig.ops->init_test(rig.state[0], &err);
    ck_assert_int_eq(st, LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "no welcome after the hello for 30.0 s"));
    byte_stream_destroy(&stream);
    expect_recovery();
}
END_TEST

START_TEST(wrong_token)
{
    open_small(_i);
    json_t *info = rig_init_info(&rig, "wrong token that must not be repeated");
    ck_ok_text(rig.ops->init_post(rig.state[0], info, &rig.ctx[0], &err), err);
    json_decref(info);
    lk_status_t st;
    while ((st = rig.ops->init_test(rig.state[0], &err)) == LK_INPROGRESS) {
        byte_stream_t *stream = rig_accept(&rig);
        if (stream != NULL) {
            sender_add(rig.sender, stream);
        }
        ck_assert_int_eq(sender_greet(rig.sender), LK_INPROGRESS);
    }
    ck_assert_int_eq(st, LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(err.text, "wrong session token"));
    ck_assert_ptr_null(strstr(err.text, "repeated"));
    ck_assert_ptr_null(strstr(err.text, RIG_TOKEN));
    char missing[512];
    sender_missing(rig.sender, missing, sizeof missing);
    ck_assert_ptr_nonnull(strstr(missing, "rank 0; refused: wrong session token"));
    rig_connect(&rig); /* the stranger did no harm */
}
END_TEST

START_TEST(trainer_dies_between_updates)
{
    open_small(_i);
    rig_connect(&rig);
    rig_trainer_dies(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    json_t *info = json_pack("{s:[], s:[], s:[]}", "names", "dtype_names", "shapes");
    update.update_info = info;
    lk_status_t st;
    /* the end of the stream takes a moment to arrive */
    while ((st = rig.ops->update_check(rig.state[0], &update, &err)) == LK_OK) {
        continue;
    }
    ck_assert_int_eq(st, LK_ERR_STATE);
    ck_assert_ptr_nonnull(strstr(err.text, "has closed its connection"));
    json_decref(info);
    rig_trainer_starts(&rig);
    expect_recovery();
}
END_TEST

/* The bytes of a whole update, cut after every possible number of them. */
START_TEST(torn_at_every_byte)
{
    lk_buf_t script;
    lk_buf_init(&script, 0);
    wte_update_t update = rig_update(&model, true, 50);
    update.n_tensors = 6;
    bool whole = false;
    for (size_t cut = 0; !whole; cut++) {
        byte_stream_t *stream = open_by_hand(_i, &update);
        lk_buf_clear(&script);
        rig_script(&rig, &script, SESSION, 1, &model, &update);
        whole = cut == script.len;
        ck_assert(rig_write(&rig, stream, script.data, cut));
        if (!whole) {
            byte_stream_destroy(&stream);
        }
        lk_status_t st = rig_finish_rank(&rig, 0, &err);
        if (whole) {
            ck_ok_text(st, err);
            rig_expect_equal(&rig, 0, &model);
            byte_stream_destroy(&stream);
        } else {
            ck_assert_int_eq(st, LK_ERR_PEER);
            ck_assert_ptr_nonnull(strstr(err.text, "bucket "));
            ck_assert_ptr_nonnull(strstr(err.text, "tensor 'tensor."));
            ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_STATE);
            teardown();
            setup();
        }
    }
    lk_buf_fini(&script);
    expect_recovery();
}
END_TEST

START_TEST(one_byte_at_a_time)
{
    wte_update_t update = rig_update(&model, false, 1);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i, &update);
    lk_buf_t script;
    lk_buf_init(&script, 0);
    rig_script(&rig, &script, SESSION, 1, &model, &update);
    for (size_t i = 0; i < script.len; i++) {
        ck_assert(rig_write(&rig, stream, script.data + i, 1));
        if (i + 1 < script.len) {
            ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
        }
    }
    ck_ok_text(rig_finish_rank(&rig, 0, &err), err);
    rig_expect_equal(&rig, 0, &model);
    for (uint64_t b = 0; b < 6; b++) { /* and every bucket was acknowledged */
        uint8_t head[TRANSFER_FRAME_SIZE];
        transfer_frame_t ack;
        do { /* over shm, slots are given back before */
            rig_read(&rig, stream, head, sizeof head);
            ck_ok_text(transfer_frame_decode(head, &ack, &err), err);
        } while (rig.shm && ack.kind == TRANSFER_TAKEN);
        ck_assert_int_eq(ack.kind, TRANSFER_ACK);
        ck_assert_uint_eq(ack.bucket, b);
        ck_assert_uint_eq(ack.update, 1);
    }
    lk_buf_fini(&script);
    byte_stream_destroy(&stream);
}
END_TEST

START_TEST(trainer_dies_before_the_acknowledgement)
{
    wte_update_t update = rig_update(&model, true, 1 << 20);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i, &update);
    lk_buf_t script;
    lk_buf_init(&script, 0);
    rig_script(&rig, &script, SESSION, 1, &model, &update);
    ck_assert(rig_write(&rig, stream, script.data, script.len));
    byte_stream_destroy(&stream);
    lk_status_t st = rig_finish_rank(&rig, 0, &err);
    /* every byte is there and right; whether the ACK found a reader is the trainer's business */
    ck_assert(st == LK_OK || st == LK_ERR_PEER);
    rig_expect_equal(&rig, 0, &model);
    lk_buf_fini(&script);
    expect_recovery();
}
END_TEST

/* ---- hostile frames: update 1, unpacked; the first bucket is tensor.0 of 120 bytes ---- */

static const struct {
    transfer_frame_t frame;
    const char *text;
} hostile[] = {
    {{TRANSFER_DATA, SESSION + 1, 1, 0, 0, 120}, "frame of another session"},
    {{TRANSFER_DATA, SESSION, 2, 0, 0, 120}, "frame of another update"},
    {{TRANSFER_DATA, SESSION, 0, 0, 0, 120}, "frame of another update"},
    {{TRANSFER_DATA, SESSION, 1, 1, 0, 3}, "frame of a wrong bucket"},
    {{TRANSFER_DATA, SESSION, 1, UINT64_MAX, 0, 3}, "frame of a wrong bucket"},
    {{TRANSFER_DATA, SESSION, 1, 0, 1, 119}, "frame at a wrong offset"},
    {{TRANSFER_DATA, SESSION, 1, 0, UINT64_MAX, 2}, "frame at a wrong offset"},
    {{TRANSFER_DATA, SESSION, 1, 0, 0, 0}, "frame of a wrong length"},
    {{TRANSFER_DATA, SESSION, 1, 0, 0, 121}, "frame of a wrong length"},
    {{TRANSFER_DATA, SESSION, 1, 0, 0, UINT64_MAX}, "frame of a wrong length"},
    {{TRANSFER_DIGEST, SESSION, 1, 0, 0, 0}, "digest before the bucket's end"},
    {{TRANSFER_DIGEST, SESSION, 1, 0, 0, 8}, "digest before the bucket's end"},
    {{TRANSFER_WELCOME, SESSION, 1, 0, 0, 0}, "unexpected frame"},
    {{TRANSFER_GO, SESSION, 1, 0, 0, 0}, "unexpected frame"},
    {{TRANSFER_ACK, SESSION, 1, 0, 0, 0}, "unexpected frame"},
    {{TRANSFER_FAIL, SESSION, 1, 0, 0, 0}, "gave up"},
    {{TRANSFER_FAIL, SESSION, 1, 0, 0, UINT64_MAX}, "FAIL frame with a text of"},
    {{(transfer_kind_t)99, SESSION, 1, 0, 0, 0}, "frame of unknown kind 99"},
};

START_TEST(hostile_frame)
{
    size_t row = (size_t)_i / N_BACKENDS;
    wte_update_t update = rig_update(&model, false, 1);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i % N_BACKENDS, &update);
    lk_buf_t bytes;
    lk_buf_init(&bytes, 0);
    rig_frame(&bytes, hostile[row].frame);
    ck_assert(rig_write(&rig, stream, bytes.data, bytes.len));
    lk_status_t st = rig_finish_rank(&rig, 0, &err);
    ck_assert_int_eq(st, LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, hostile[row].text) != NULL, "%s", err.text);
    ck_assert_ptr_nonnull(strstr(err.text, "bucket 1 of 6, tensor 'tensor.0', 0 of 120 bytes"));
    ck_assert_uint_eq(rig.sink[0]->tensors, 0);
    lk_buf_fini(&bytes);
    byte_stream_destroy(&stream);
    expect_recovery();
}
END_TEST

/* byte of the header to spoil: magic, version */
START_TEST(hostile_header)
{
    static const struct {
        size_t byte;
        const char *text;
    } spoil[] = {{0, "not a transfer frame"}, {4, "protocol version"}};
    for (size_t i = 0; i < LK_ARRAY_LEN(spoil); i++) {
        wte_update_t update = rig_update(&model, false, 1);
        update.n_tensors = 6;
        byte_stream_t *stream = open_by_hand(_i, &update);
        lk_buf_t bytes;
        lk_buf_init(&bytes, 0);
        rig_frame(&bytes, (transfer_frame_t){TRANSFER_DATA, SESSION, 1, 0, 0, 120});
        bytes.data[spoil[i].byte] ^= 0x55;
        ck_assert(rig_write(&rig, stream, bytes.data, bytes.len));
        ck_assert_int_eq(rig_finish_rank(&rig, 0, &err), LK_ERR_PEER);
        ck_assert_msg(strstr(err.text, spoil[i].text) != NULL, "%s", err.text);
        lk_buf_fini(&bytes);
        byte_stream_destroy(&stream);
        if (i + 1 < LK_ARRAY_LEN(spoil)) {
            teardown();
            setup();
        }
    }
    expect_recovery();
}
END_TEST

START_TEST(spoiled_byte_fails_the_digest)
{
    wte_update_t update = rig_update(&model, true, 1 << 20);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i, &update);
    lk_buf_t script;
    lk_buf_init(&script, 0);
    rig_script(&rig, &script, SESSION, 1, &model, &update);
    *(rig.shm ? rig.ring.map + 5 : script.data + TRANSFER_FRAME_SIZE + 5) ^= 1;
    ck_assert(rig_write(&rig, stream, script.data, script.len));
    ck_assert_int_eq(rig_finish_rank(&rig, 0, &err), LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(err.text, "digest of the received bytes"));
    ck_assert_uint_eq(rig.sink[0]->tensors, 0);
    lk_buf_fini(&script);
    byte_stream_destroy(&stream);
    expect_recovery();
}
END_TEST

START_TEST(no_progress_deadline)
{
    wte_update_t update = rig_update(&model, false, 1);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i, &update);
    lk_buf_t bytes;
    lk_buf_init(&bytes, 0);
    rig_frame(&bytes, (transfer_frame_t){TRANSFER_DATA, SESSION, 1, 0, 0, 120});
    uint64_t payload = rig.shm ? 0 : 10;
    if (rig.shm) { /* whole payloads, or none: the first two bytes of a header stand for some */
        bytes.len = 2;
    } else {
        lk_buf_append(&bytes, "0123456789", 10);
    }
    ck_assert(rig_write(&rig, stream, bytes.data, bytes.len));
    wte_progress_t progress = {0};
    do {
        ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
        rig.ops->progress(rig.state[0], &progress);
    } while (progress.bytes_done < payload);
    ck_assert_ptr_nonnull(strstr(progress.waiting_for, "bucket 1 of 6"));
    rig.now_ns += RIG_LIMIT_NS - 1;
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
    ck_assert(rig_write(&rig, stream, "x", 1)); /* one byte is progress */
    payload += !rig.shm;
    do {
        lk_status_t st = rig.ops->update_test(rig.state[0], &err);
        ck_assert_msg(st == LK_INPROGRESS, "%s", err.text);
        rig.ops->progress(rig.state[0], &progress);
    } while (progress.bytes_done < payload);
    rig.now_ns += RIG_LIMIT_NS - 1;
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
    rig.now_ns += 1;
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "no progress for 30.0 s from trainer"));
    ck_assert_ptr_nonnull(
        strstr(err.text, rig.shm ? "bucket 1 of 6, tensor 'tensor.0', 0 of 120 bytes received"
                                 : "bucket 1 of 6, tensor 'tensor.0', 11 of 120 bytes received"));
    lk_buf_fini(&bytes);
    byte_stream_destroy(&stream);
    expect_recovery();
}
END_TEST

START_TEST(pollfds_are_worth_waiting_for)
{
    wte_update_t update = rig_update(&model, false, 1);
    update.n_tensors = 6;
    byte_stream_t *stream = open_by_hand(_i, &update);
    struct pollfd fds[4];
    size_t n = rig.ops->pollfds(rig.state[0], fds, 4);
    ck_assert_uint_eq(n, rig.tcp || rig.shm ? 1 : 0);
    ck_assert_uint_eq(rig.ops->pollfds(rig.state[0], fds, 0), 0);
    if (n > 0) {
        ck_assert_int_eq(poll(fds, n, 0), 0);
        ck_assert(rig_write(&rig, stream, "x", 1));
        ck_assert_int_eq(poll(fds, n, 10000), 1);
    }
    byte_stream_destroy(&stream);
}
END_TEST

/* ---- the trainer's half ---- */

START_TEST(sender_names_the_rank_that_is_silent)
{
    small_model();
    rig_init(&rig, backends[_i], 2, 1, 1 << 16, &model);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, true, 1 << 20);
    ck_ok_text(sender_begin(rig.sender, model.descs, (const void *const *)model.data, model.n, true,
                            1 << 20, &err),
               err);
    rig.n_ranks = 1; /* rank 1 does not enter */
    rig_begin(&rig, NULL, &update);
    rig.n_ranks = 2;
    while (rig.ops->update_test(rig.state[0], &err) == LK_INPROGRESS) {
        ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
    }
    ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
    rig.now_ns += RIG_LIMIT_NS;
    lk_status_t st = sender_step(rig.sender, &err);
    ck_assert_int_eq(st, LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "rank 1"));
    ck_assert_ptr_nonnull(
        strstr(err.text, "no progress for 30.0 s (it has not entered the update)"));
    ck_assert(!sender_usable(rig.sender));
}
END_TEST

START_TEST(sender_names_the_rank_that_dies)
{
    small_model();
    rig_tensors_add(&model, LK_DTYPE_U8, 1 << 20, &prng);
    rig_init(&rig, backends[_i], 2, 1, 1 << 16, &model);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    ck_assert_int_eq(rig.ops->update_test(rig.state[1], &err), LK_INPROGRESS);
    ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
    rig.ops->fini(rig.state[1]);
    lk_status_t st;
    while ((st = sender_step(rig.sender, &err)) == LK_INPROGRESS) {
        continue;
    }
    ck_assert_int_eq(st, LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(err.text, "rank 1"));
    /* rank 0 is told, and does not hang */
    ck_assert_int_eq(rig_finish_rank(&rig, 0, &err), LK_ERR_PEER);
}
END_TEST

/* A rank that has everything may go while another one is still receiving. */
START_TEST(sender_goes_on_when_a_finished_rank_dies)
{
    small_model();
    rig_init(&rig, backends[_i], 2, 1, 1 << 16, &model);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    lk_status_t st;
    while ((st = rig.ops->update_test(rig.state[0], &err)) == LK_INPROGRESS) {
        ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
    }
    ck_ok_text(st, err);
    rig.ops->fini(rig.state[0]); /* its last ACK and its end may be read together */
    lk_status_t sent = LK_INPROGRESS;
    for (st = LK_INPROGRESS; st == LK_INPROGRESS || sent == LK_INPROGRESS;) {
        st = st == LK_INPROGRESS ? rig.ops->update_test(rig.state[1], &err) : st;
        sent = sent == LK_INPROGRESS ? sender_step(rig.sender, &err) : sent;
    }
    ck_ok_text(st, err);
    ck_ok_text(sent, err);
    rig_expect_equal(&rig, 1, &model);
}
END_TEST

START_TEST(sender_refuses_another_layout)
{
    open_small(_i);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, true, 50);
    rig_begin(&rig, NULL, &update);
    ck_ok_text(sender_begin(rig.sender, model.descs, (const void *const *)model.data, model.n,
                            false, 1, &err),
               err);
    lk_status_t st;
    lk_error_t rank = LK_ERROR_INIT;
    while ((st = sender_step(rig.sender, &err)) == LK_INPROGRESS) {
        ck_assert_int_eq(rig.ops->update_test(rig.state[0], &rank), LK_INPROGRESS);
    }
    ck_assert_int_eq(st, LK_ERR_PEER);
    ck_assert_ptr_nonnull(strstr(err.text, "it expects "));
    ck_assert_int_eq(rig_finish_rank(&rig, 0, &rank), LK_ERR_PEER);
}
END_TEST

START_TEST(refused_update_leaves_the_connection_usable)
{
    open_small(_i);
    rig_connect(&rig);
    ck_ok_text(sender_begin(rig.sender, model.descs, (const void *const *)model.data, model.n, true,
                            50, &err),
               err);
    ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
    sender_cancel(rig.sender, "the call was refused");
    ck_assert(sender_usable(rig.sender));
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    rig_run(&rig);
    rig_expect_equal(&rig, 0, &model);
}
END_TEST

START_TEST(cancel_in_the_middle_tells_the_ranks)
{
    open_small(_i);
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    ck_assert_int_eq(rig.ops->update_test(rig.state[0], &err), LK_INPROGRESS);
    lk_status_t st = LK_INPROGRESS;
    while (sender_bytes(rig.sender) == 0 && st == LK_INPROGRESS) {
        st = sender_step(rig.sender, &err);
    }
    sender_cancel(rig.sender, "changed my mind");
    ck_assert(!sender_usable(rig.sender));
    st = rig_finish_rank(&rig, 0, &err);
    /* all of this little model may have been under way already */
    ck_assert(st == LK_ERR_PEER || st == LK_OK);
    expect_recovery();
}
END_TEST

/* hello spoiled: garbage, wrong rank, wrong group size, wrong lanes, token too long */
START_TEST(strangers_are_turned_away)
{
    open_small(_i);
    static const transfer_hello_t hellos[] = {
        {1, 1, 1, 0, 1, sizeof RIG_TOKEN - 1}, {1, 0, 2, 0, 1, sizeof RIG_TOKEN - 1},
        {1, 0, 1, 1, 1, sizeof RIG_TOKEN - 1}, {1, 0, 1, 0, 2, sizeof RIG_TOKEN - 1},
        {1, 0, 1, 0, 1, UINT32_MAX},           {1, 0, 1, 0, 1, sizeof RIG_TOKEN - 2},
    };
    for (size_t i = 0; i <= LK_ARRAY_LEN(hellos); i++) {
        rig_post_init(&rig, 0);
        byte_stream_t *theirs = rig_accept_from(&rig, 0);
        rig.ops->abort(rig.state[0]);
        byte_stream_destroy(&theirs);
        /* a stranger on the same listener */
        uint8_t bytes[TRANSFER_HELLO_SIZE + sizeof RIG_TOKEN - 1];
        memset(bytes, 'G', sizeof bytes);
        if (i < LK_ARRAY_LEN(hellos)) {
            transfer_hello_encode(&hellos[i], bytes);
            memcpy(bytes + TRANSFER_HELLO_SIZE, RIG_TOKEN, sizeof RIG_TOKEN - 1);
        }
        byte_stream_t *dialled = rig_dial(&rig);
        byte_stream_t *accepted = NULL;
        while (accepted == NULL) {
            lk_status_t st = dialled->ops->connect(dialled, &err);
            ck_assert_msg(st >= 0, "%s", err.text);
            accepted = st == LK_OK ? rig_accept(&rig) : NULL;
        }
        sender_add(rig.sender, accepted);
        struct iovec iov = {bytes, sizeof bytes};
        size_t moved = 0;
        ck_ok_text(dialled->ops->writev(dialled, &iov, 1, &moved, &err), err);
        uint8_t answer[TRANSFER_FRAME_SIZE];
        size_t got = 0;
        while (got < sizeof answer) {
            ck_assert_int_eq(sender_greet(rig.sender), LK_INPROGRESS);
            struct iovec in = {answer + got, sizeof answer - got};
            moved = 0;
            lk_status_t st = dialled->ops->readv(dialled, &in, 1, &moved, &err);
            ck_assert_msg(st >= 0, "%zu: %s", i, err.text);
            got += moved;
        }
        transfer_frame_t frame;
        ck_ok_text(transfer_frame_decode(answer, &frame, &err), err);
        ck_assert_int_eq(frame.kind, TRANSFER_FAIL);
        byte_stream_destroy(&dialled);
    }
    rig_connect(&rig);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("weight_transfer_engine");
    TCase *tc = tcase_create("contract");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, init_info, 0, LK_ARRAY_LEN(init_rows));
    tcase_add_test(tc, world_size_must_hold_all_ranks);
    tcase_add_loop_test(tc, moves_every_byte, 0, 16 * N_BACKENDS);
    tcase_add_loop_test(tc, hostile_frame, 0, (int)LK_ARRAY_LEN(hostile) * N_BACKENDS);
#define EACH(test) tcase_add_loop_test(tc, test, 0, N_BACKENDS)
    EACH(order_of_operations);
    EACH(abort_in_every_state);
    EACH(no_tensors_at_all);
    EACH(memory_is_bounded_by_the_bucket);
    EACH(work_per_call_is_bounded);
    EACH(sink_error_ends_the_update);
    EACH(trainer_is_not_there_yet);
    EACH(trainer_never_comes);
    EACH(trainer_dies_in_hello);
    EACH(trainer_says_nothing_in_hello);
    EACH(wrong_token);
    EACH(trainer_dies_between_updates);
    EACH(torn_at_every_byte);
    EACH(one_byte_at_a_time);
    EACH(trainer_dies_before_the_acknowledgement);
    EACH(hostile_header);
    EACH(spoiled_byte_fails_the_digest);
    EACH(no_progress_deadline);
    EACH(pollfds_are_worth_waiting_for);
    EACH(sender_names_the_rank_that_is_silent);
    EACH(sender_names_the_rank_that_dies);
    EACH(sender_goes_on_when_a_finished_rank_dies);
    EACH(sender_refuses_another_layout);
    EACH(refused_update_leaves_the_connection_usable);
    EACH(cancel_in_the_middle_tells_the_ranks);
    EACH(strangers_are_turned_away);
#undef EACH
    suite_add_tcase(suite, tc);
    TCase *plain = tcase_create("registry");
    tcase_add_test(plain, registry);
    suite_add_tcase(suite, plain);
    return suite;
}
