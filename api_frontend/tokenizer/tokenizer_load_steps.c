/* "normalizer", "pre_tokenizer", "decoder" and "post_processor", and what tokenizer_config.json
 * changes in them. */
#include "api_frontend/tokenizer/tokenizer_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WHERE_MAX 160 /* a path such as pre_tokenizer.pretokenizers[1] */

static lk_status_t refuse_type(const char *where, const char *type, const char *supported,
                               lk_error_t *err)
{
    return lk_error_set(err, LK_ERR_UNSUPPORTED,
                        "%s.type \"%s\" is not supported, supported are: %s", where,
                        vocab_quote(type, strlen(type)).s, supported);
}

/* Calls one() for the component, or for each member of a (nested) "Sequence" whose list is `key`.
 * The depth of nesting is limited by the JSON's. */
typedef lk_status_t (*component_fn)(tokenizer_t *t, json_t *object, const char *where,
                                    const char *type, lk_error_t *err);

static lk_status_t for_each(tokenizer_t *t, json_t *object, const char *where, const char *key,
                            component_fn one, lk_error_t *err)
{
    const char *type;
    json_t *list, *member;
    size_t i;
    LK_RETURN_IF_ERROR(json_in_type(object, where, &type, err));
    if (strcmp(type, "Sequence") != 0) {
        return one(t, object, where, type, err);
    }
    LK_RETURN_IF_ERROR(json_in_member(object, where, key, JSON_ARRAY, &list, err));
    if (list == NULL) {
        return lk_error_set(err, LK_ERR_INVALID, "%s.%s is missing", where, key);
    }
    json_array_foreach(list, i, member)
    {
        char inner[WHERE_MAX];
        if ((size_t)snprintf(inner, sizeof inner, "%s.%s[%zu]", where, key, i) >= sizeof inner) {
            return lk_error_set(err, LK_ERR_TOO_LARGE, "%s is nested too deeply", where);
        }
        LK_RETURN_IF_ERROR(for_each(t, member, inner, key, one, err));
    }
    return LK_OK;
}

static bool is_missing(json_t *root, const char *key)
{
    json_t *value = json_object_get(root, key);
    return value == NULL || json_is_null(value);
}

static lk_status_t add_normalizer(tokenizer_t *t, json_t *object, const char *where,
                                  const char *type, lk_error_t *err)
{
    normalizer_form_t form = normalizer_by_name(type);
    if (form == NORMALIZER_N) {
        return refuse_type(where, type, "NFC, NFD, NFKC, NFKD, Sequence", err);
    }
    if (t->n_normalizers == TOKENIZER_MAX_NORMALIZERS) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "%s: more than %d normalizers", where,
                            TOKENIZER_MAX_NORMALIZERS);
    }
    t->normalizers[t->n_normalizers++] = form;
    return LK_OK;
}

lk_status_t tokenizer_load_normalizer(tokenizer_t *t, json_t *root, lk_error_t *err)
{
    if (is_missing(root, "normalizer")) {
        return LK_OK;
    }
    return for_each(t, json_object_get(root, "normalizer"), "normalizer", "normalizers",
                    add_normalizer, err);
}

static lk_status_t add_step(tokenizer_t *t, const char *where, const char *pattern, bool literal,
                            pretokenizer_step_t step, lk_error_t *err)
{
    if (split_regex_new(pattern, literal, &step.regex, err) != LK_OK) {
        return lk_error_prefix(err, "%s.pattern", where);
    }
    return pretokenizer_add(&t->pretokenizer, &step, err) == LK_OK
               ? LK_OK
               : lk_error_prefix(err, "%s", where);
}

static lk_status_t add_split(tokenizer_t *t, json_t *object, const char *where, lk_error_t *err)
{
    json_t *pattern;
    const char *regex, *string, *behavior;
    pretokenizer_step_t step = {0};
    char inner[WHERE_MAX + 16];
    snprintf(inner, sizeof inner, "%s.pattern", where);
    LK_RETURN_IF_ERROR(json_in_member(object, where, "pattern", JSON_OBJECT, &pattern, err));
    LK_RETURN_IF_ERROR(json_in_string(pattern, inner, "Regex", &regex, err));
    LK_RETURN_IF_ERROR(json_in_string(pattern, inner, "String", &string, err));
    if ((regex == NULL) == (string == NULL)) {
        return lk_error_set(err, LK_ERR_INVALID, "%s has to be a Regex or a String", inner);
    }
    LK_RETURN_IF_ERROR(json_in_string(object, where, "behavior", &behavior, err));
    step.behavior =
        behavior == NULL ? PRETOKENIZER_BEHAVIOR_N : pretokenizer_behavior_by_name(behavior);
    if (step.behavior == PRETOKENIZER_BEHAVIOR_N) {
        return lk_error_set(err, LK_ERR_INVALID, "%s.behavior is missing or unknown", where);
    }
    LK_RETURN_IF_ERROR(json_in_need_bool(object, where, "invert", &step.invert, err));
    return add_step(t, where, regex != NULL ? regex : string, regex == NULL, step, err);
}

static lk_status_t add_byte_level(tokenizer_t *t, json_t *object, const char *where,
                                  lk_error_t *err)
{
    bool space, use_regex = true;
    LK_RETURN_IF_ERROR(json_in_need_bool(object, where, "add_prefix_space", &space, err));
    LK_RETURN_IF_ERROR(json_in_bool(object, where, "use_regex", &use_regex, err));
    if (pretokenizer_add_byte_level(&t->pretokenizer, space, use_regex, err) != LK_OK) {
        return lk_error_prefix(err, "%s", where);
    }
    return LK_OK;
}

static lk_status_t add_pretokenizer(tokenizer_t *t, json_t *object, const char *where,
                                    const char *type, lk_error_t *err)
{
    if (t->pretokenizer.is_complete) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "%s: nothing is supported after the ByteLevel step", where);
    }
    if (strcmp(type, "Split") == 0) {
        return add_split(t, object, where, err);
    }
    if (strcmp(type, "ByteLevel") == 0) {
        return add_byte_level(t, object, where, err);
    }
    if (strcmp(type, "Digits") == 0) {
        bool single;
        LK_RETURN_IF_ERROR(json_in_need_bool(object, where, "individual_digits", &single, err));
        pretokenizer_step_t step = {.behavior =
                                        single ? PRETOKENIZER_ISOLATED : PRETOKENIZER_CONTIGUOUS};
        return add_step(t, where, "\\p{N}", false, step, err);
    }
    return refuse_type(where, type, "ByteLevel, Split, Digits, Sequence", err);
}

lk_status_t tokenizer_load_pretokenizer(tokenizer_t *t, json_t *root, lk_error_t *err)
{
    if (!is_missing(root, "pre_tokenizer")) {
        LK_RETURN_IF_ERROR(for_each(t, json_object_get(root, "pre_tokenizer"), "pre_tokenizer",
                                    "pretokenizers", add_pretokenizer, err));
    }
    return t->pretokenizer.is_complete
               ? LK_OK
               : lk_error_set(err, LK_ERR_UNSUPPORTED,
                              "pre_tokenizer has no ByteLevel step; only byte-level BPE is "
                              "supported");
}

static lk_status_t check_decoder(tokenizer_t *t, json_t *object, const char *where,
                                 const char *type, lk_error_t *err)
{
    return strcmp(type, "ByteLevel") == 0 ? LK_OK
                                          : refuse_type(where, type, "ByteLevel, Sequence", err);
}

lk_status_t tokenizer_load_decoder(json_t *root, lk_error_t *err)
{
    if (is_missing(root, "decoder")) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "decoder is missing; ByteLevel is supported");
    }
    return for_each(NULL, json_object_get(root, "decoder"), "decoder", "decoders", check_decoder,
                    err);
}

/* Appends the ids that a template's special token stands for. */
static lk_status_t add_template_ids(tokenizer_t *t, json_t *object, const char *where,
                                    const char *name, bpe_ids_t *out, lk_error_t *err)
{
    json_t *map, *token, *ids, *id;
    size_t i;
    vocab_quote_t q = vocab_quote(name, strlen(name));
    LK_RETURN_IF_ERROR(json_in_member(object, where, "special_tokens", JSON_OBJECT, &map, err));
    token = json_object_get(map, name);
    ids = json_object_get(token, "ids");
    if (!json_is_array(ids) || json_array_size(ids) > 16) {
        return lk_error_set(err, LK_ERR_INVALID, "%s.special_tokens: \"%s\" has no list of ids",
                            where, q.s);
    }
    json_array_foreach(ids, i, id)
    {
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= VOCAB_MAX_IDS ||
            vocab_get(&t->vocab, (uint32_t)value) == NULL) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "%s.special_tokens: \"%s\": ids[%zu] is not the id of a token",
                                where, q.s, i);
        }
        if (!bpe_ids_push(out, (uint32_t)value)) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the post-processor");
        }
    }
    return LK_OK;
}

static lk_status_t add_template(tokenizer_t *t, json_t *object, const char *where, lk_error_t *err)
{
    json_t *single, *item;
    size_t i;
    bool text_seen = false;
    if (t->has_template) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "%s: a second template", where);
    }
    t->has_template = true;
    LK_RETURN_IF_ERROR(json_in_member(object, where, "single", JSON_ARRAY, &single, err));
    if (single == NULL || json_array_size(single) > 16) {
        return lk_error_set(err, LK_ERR_INVALID, "%s.single is missing or too long", where);
    }
    json_array_foreach(single, i, item)
    {
        json_t *sequence = json_object_get(item, "Sequence");
        json_t *special = json_object_get(item, "SpecialToken");
        const char *id = json_string_value(json_object_get(sequence ? sequence : special, "id"));
        bool is_text = sequence != NULL && id != NULL && strcmp(id, "A") == 0 && !text_seen;
        if (id == NULL || (sequence != NULL && !is_text)) {
            return lk_error_set(err, LK_ERR_INVALID,
                                "%s.single[%zu] is neither a SpecialToken nor the one Sequence A",
                                where, i);
        }
        if (is_text) {
            text_seen = true;
        } else {
            LK_RETURN_IF_ERROR(
                add_template_ids(t, object, where, id, text_seen ? &t->suffix : &t->prefix, err));
        }
    }
    return text_seen ? LK_OK
                     : lk_error_set(err, LK_ERR_INVALID, "%s.single has no Sequence A", where);
}

static lk_status_t add_post_processor(tokenizer_t *t, json_t *object, const char *where,
                                      const char *type, lk_error_t *err)
{
    if (strcmp(type, "TemplateProcessing") == 0) {
        return add_template(t, object, where, err);
    }
    /* ByteLevel trims offsets, which nothing here uses */
    return strcmp(type, "ByteLevel") == 0
               ? LK_OK
               : refuse_type(where, type, "ByteLevel, TemplateProcessing, Sequence", err);
}

lk_status_t tokenizer_load_post_processor(tokenizer_t *t, json_t *root, lk_error_t *err)
{
    if (is_missing(root, "post_processor")) {
        return LK_OK;
    }
    return for_each(t, json_object_get(root, "post_processor"), "post_processor", "processors",
                    add_post_processor, err);
}

/* The id of a token that tokenizer_config.json names, as a string or {"content": ...}. */
static uint32_t named_token(tokenizer_t *t, json_t *config, const char *key)
{
    json_t *value = json_object_get(config, key);
    if (json_is_object(value)) {
        value = json_object_get(value, "content");
    }
    const char *text = json_string_value(value);
    return text == NULL ? TOKENIZER_NO_ID : tokenizer_token_id(t, text);
}

/* add_bos_token or add_eos_token, where given, decides about this end of the template. */
static lk_status_t override_end(json_t *config, const char *key, const char *name, uint32_t id,
                                bpe_ids_t *ids, bool front, lk_error_t *err)
{
    bool has = ids->len > 0 && id != TOKENIZER_NO_ID && ids->data[front ? 0 : ids->len - 1] == id;
    bool want = has;
    LK_RETURN_IF_ERROR(json_in_bool(config, "", key, &want, err));
    if (want == has) {
        return LK_OK;
    }
    if (id == TOKENIZER_NO_ID) {
        return lk_error_set(err, LK_ERR_INVALID, "%s is true, but %s is not a token", key, name);
    }
    if (want && !bpe_ids_push(ids, id)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the post-processor");
    }
    if (want && front) {
        memmove(ids->data + 1, ids->data, (ids->len - 1) * sizeof *ids->data);
        ids->data[0] = id;
    } else if (!want) {
        ids->len--;
        if (front) {
            memmove(ids->data, ids->data + 1, ids->len * sizeof *ids->data);
        }
    }
    return LK_OK;
}

lk_status_t tokenizer_load_config(tokenizer_t *t, json_t *config, lk_error_t *err)
{
    /* reaches a byte-level step that stands alone, as the reference's loader does */
    if (t->pretokenizer.prefix_before == 0) {
        LK_RETURN_IF_ERROR(
            json_in_bool(config, "", "add_prefix_space", &t->pretokenizer.add_prefix_space, err));
    }
    t->bos_id = named_token(t, config, "bos_token");
    t->eos_id = named_token(t, config, "eos_token");
    LK_RETURN_IF_ERROR(
        override_end(config, "add_bos_token", "bos_token", t->bos_id, &t->prefix, true, err));
    return override_end(config, "add_eos_token", "eos_token", t->eos_id, &t->suffix, false, err);
}
