#include "proto/json_text.h"
#include "base/hash.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH                                                                                  \
    64 /* of what is read here; anything deeper is jansson's, which has its own limit */

typedef struct {
    const char *at, *end;
    unsigned depth;
} reader_t;

/* Every read_* returns NULL for whatever is out of the ordinary: jansson reads it again, all of it,
 * and says what is wrong, or that nothing is. */
static json_t *read_value(reader_t *self);

static void skip_blanks(reader_t *self)
{
    while (self->at < self->end &&
           (*self->at == ' ' || *self->at == '\n' || *self->at == '\t' || *self->at == '\r')) {
        self->at++;
    }
}

/* Takes the character, after blanks. */
static bool take(reader_t *self, char c)
{
    skip_blanks(self);
    if (self->at == self->end || *self->at != c) {
        return false;
    }
    self->at++;
    return true;
}

/* ---- strings ---- */

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The four digits after a \u, or -1. */
static int32_t read_hex4(reader_t *self)
{
    int32_t x = 0;
    if (self->end - self->at < 4) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(*self->at++);
        if (digit < 0) {
            return -1;
        }
        x = x << 4 | digit;
    }
    return x;
}

static bool put_code_point(lk_buf_t *out, uint32_t c)
{
    uint8_t bytes[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i > 1; i--) {
        bytes[i - 1] = (uint8_t)(0x80 | (c & 0x3F));
        c >>= 6;
    }
    bytes[0] = (uint8_t)(lead[n] | c);
    lk_buf_append(out, bytes, n);
    return !out->failed;
}

/* After the backslash. A NUL and half a surrogate pair are jansson's to judge. */
static bool read_escape(reader_t *self, lk_buf_t *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (self->at == self->end) {
        return false;
    }
    char c = *self->at++;
    const char *found = c != '\0' ? strchr(names, c) : NULL;
    if (found != NULL) {
        lk_buf_append(out, &values[found - names], 1);
        return !out->failed;
    }
    int32_t x = c == 'u' ? read_hex4(self) : -1;
    if (x <= 0 || (x >= 0xDC00 && x <= 0xDFFF)) {
        return false;
    }
    if (x >= 0xD800 && x <= 0xDBFF) {
        if (self->end - self->at < 2 || self->at[0] != '\\' || self->at[1] != 'u') {
            return false;
        }
        self->at += 2;
        int32_t low = read_hex4(self);
        if (low < 0xDC00 || low > 0xDFFF) {
            return false;
        }
        x = 0x10000 + ((x - 0xD800) << 10) + (low - 0xDC00);
    }
    return put_code_point(out, (uint32_t)x);
}

/* The quote that opens it was taken. What stands for itself is borrowed from the text; *owned has
 * the bytes otherwise (and is the caller's to end in any case). */
static bool read_text(reader_t *self, const char **out, size_t *len, lk_buf_t *owned)
{
    const char *start = self->at;
    self->at += lk_json_plain(self->at, (size_t)(self->end - self->at));
    if (self->at < self->end && *self->at == '"') {
        *out = start;
        *len = (size_t)(self->at++ - start);
        return true;
    }
    while (self->at < self->end && *self->at != '"') {
        unsigned char c = (unsigned char)*self->at;
        lk_buf_append(owned, start, (size_t)(self->at - start));
        start = self->at;
        if (c < 0x20) {
            return false;
        }
        if (c == '\\') {
            self->at++;
            if (!read_escape(self, owned)) {
                return false;
            }
            start = self->at;
        } else { /* a run of other bytes, whose UTF-8 is looked at below */
            while (self->at < self->end && (unsigned char)*self->at >= 0x80) {
                self->at++;
            }
            if (!lk_utf8_valid(start, (size_t)(self->at - start))) {
                return false;
            }
        }
        self->at += lk_json_plain(self->at, (size_t)(self->end - self->at));
    }
    lk_buf_append(owned, start, (size_t)(self->at - start));
    if (self->at == self->end || owned->failed) {
        return false;
    }
    self->at++;
    *out = lk_buf_cstr(owned);
    *len = owned->len;
    return true;
}

static json_t *read_string(reader_t *self)
{
    const char *text;
    size_t len;
    lk_buf_t owned;
    lk_buf_init(&owned, 0);
    json_t *made = read_text(self, &text, &len, &owned) ? json_stringn_nocheck(text, len) : NULL;
    lk_buf_fini(&owned);
    return made;
}

/* ---- numbers and words ---- */

static void skip_digits(reader_t *self)
{
    while (self->at < self->end && *self->at >= '0' && *self->at <= '9') {
        self->at++;
    }
}

/* One digit at least. */
static bool take_digits(reader_t *self)
{
    const char *start = self->at;
    skip_digits(self);
    return self->at > start;
}

static json_t *read_real(const char *start, const char *end)
{
    char text[64];
    size_t n = (size_t)(end - start);
    if (n >= sizeof text) {
        return NULL;
    }
    memcpy(text, start, n);
    text[n] = '\0';
    errno = 0;
    char *tail; /* strtod follows the locale, and then stops before the point */
    double x = strtod(text, &tail);
    return *tail == '\0' && isfinite(x) ? json_real(x) : NULL;
}

static json_t *read_number(reader_t *self)
{
    const char *start = self->at;
    bool negative = *self->at == '-';
    self->at += negative;
    const char *digits = self->at;
    if (!take_digits(self) || (*digits == '0' && self->at - digits > 1)) {
        return NULL;
    }
    const char *digits_end = self->at;
    bool real = false;
    if (self->at < self->end && *self->at == '.') {
        real = true;
        self->at++;
        if (!take_digits(self)) {
            return NULL;
        }
    }
    if (self->at < self->end && (*self->at == 'e' || *self->at == 'E')) {
        real = true;
        self->at++;
        self->at += self->at < self->end && (*self->at == '+' || *self->at == '-');
        if (!take_digits(self)) {
            return NULL;
        }
    }
    if (real) {
        return read_real(start, self->at);
    }
    if (digits_end - digits > 18) { /* may be too large for 63 bits */
        return NULL;
    }
    json_int_t x = 0;
    for (const char *p = digits; p < digits_end; p++) {
        x = 10 * x + (*p - '0');
    }
    return json_integer(negative ? -x : x);
}

static json_t *read_word(reader_t *self, const char *word, json_t *value)
{
    size_t n = strlen(word);
    if ((size_t)(self->end - self->at) < n || memcmp(self->at, word, n) != 0) {
        return NULL;
    }
    self->at += n;
    /* jansson takes all letters for one word */
    char next = self->at < self->end ? *self->at : ' ';
    bool more = (next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z');
    return more ? NULL : value;
}

/* ---- arrays, objects ---- */

static json_t *read_array(reader_t *self)
{
    json_t *array = json_array();
    if (array == NULL || take(self, ']')) {
        return array;
    }
    do {
        json_t *item = read_value(self);
        if (item == NULL || json_array_append_new(array, item) != 0) {
            goto err_array;
        }
    } while (take(self, ','));
    if (take(self, ']')) {
        return array;
    }

err_array:
    json_decref(array);
    return NULL;
}

static bool read_member(reader_t *self, json_t *object)
{
    const char *key;
    size_t len;
    lk_buf_t owned;
    lk_buf_init(&owned, 0);
    bool ok = take(self, '"') && read_text(self, &key, &len, &owned) &&
              json_object_getn(object, key, len) == NULL && take(self, ':');
    json_t *value = ok ? read_value(self) : NULL;
    ok = value != NULL && json_object_setn_new_nocheck(object, key, len, value) == 0;
    lk_buf_fini(&owned);
    return ok;
}

static json_t *read_object(reader_t *self)
{
    json_t *object = json_object();
    if (object == NULL || take(self, '}')) {
        return object;
    }
    do {
        if (!read_member(self, object)) {
            goto err_object;
        }
    } while (take(self, ','));
    if (take(self, '}')) {
        return object;
    }

err_object:
    json_decref(object);
    return NULL;
}

static json_t *read_nested(reader_t *self, json_t *(*read)(reader_t *))
{
    if (self->depth == MAX_DEPTH) {
        return NULL;
    }
    self->depth++;
    self->at++;
    json_t *made = read(self);
    self->depth--;
    return made;
}

static json_t *read_value(reader_t *self)
{
    skip_blanks(self);
    if (self->at == self->end) {
        return NULL;
    }
    switch (*self->at) {
    case '{':
        return read_nested(self, read_object);
    case '[':
        return read_nested(self, read_array);
    case '"':
        self->at++;
        return read_string(self);
    case 't':
        return read_word(self, "true", json_true());
    case 'f':
        return read_word(self, "false", json_false());
    case 'n':
        return read_word(self, "null", json_null());
    default:
        return read_number(self);
    }
}

json_t *json_text_read(const char *text, size_t len, size_t flags, json_error_t *error)
{
    reader_t reader = {text, text + len, 0};
    json_t *value = len > 0 ? read_value(&reader) : NULL;
    skip_blanks(&reader);
    bool whole = value != NULL && reader.at == reader.end &&
                 ((flags & JSON_DECODE_ANY) != 0 || json_is_object(value) || json_is_array(value));
    if (!whole) {
        json_decref(value);
        return json_loadb(text, len, JSON_REJECT_DUPLICATES | flags, error);
    }
    return value;
}

/* ---- writing ---- */

static void write_integer(lk_buf_t *out, json_int_t value)
{
    char text[24], *at = text + sizeof text;
    unsigned long long x = value < 0 ? 0 - (unsigned long long)value : (unsigned long long)value;
    do {
        *--at = (char)('0' + x % 10);
        x /= 10;
    } while (x > 0);
    if (value < 0) {
        *--at = '-';
    }
    lk_buf_append(out, at, (size_t)(text + sizeof text - at));
}

static void write_string(lk_buf_t *out, const json_t *value)
{
    lk_buf_json_str(out, json_string_value(value), json_string_length(value));
}

/* As jansson writes it: the shortest of 17 digits, always with a point or an exponent. */
static void write_real(lk_buf_t *out, const json_t *value)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    if (text == NULL) {
        out->failed = true;
        return;
    }
    lk_buf_str(out, text);
    free(text);
}

void json_text_write(lk_buf_t *out, const json_t *value)
{
    const char *key;
    size_t key_len, i;
    json_t *item;
    bool first = true;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        lk_buf_append(out, "{", 1);
        json_object_keylen_foreach((json_t *)value, key, key_len, item)
        {
            lk_buf_append(out, ",", first ? 0 : 1);
            first = false;
            lk_buf_json_str(out, key, key_len);
            lk_buf_append(out, ":", 1);
            json_text_write(out, item);
        }
        lk_buf_append(out, "}", 1);
        break;
    case JSON_ARRAY:
        lk_buf_append(out, "[", 1);
        json_array_foreach(value, i, item)
        {
            lk_buf_append(out, ",", i == 0 ? 0 : 1);
            json_text_write(out, item);
        }
        lk_buf_append(out, "]", 1);
        break;
    case JSON_STRING:
        write_string(out, value);
        break;
    case JSON_INTEGER:
        write_integer(out, json_integer_value(value));
        break;
    case JSON_REAL:
        write_real(out, value);
        break;
    case JSON_TRUE:
        lk_buf_str(out, "true");
        break;
    case JSON_FALSE:
        lk_buf_str(out, "false");
        break;
    case JSON_NULL:
        lk_buf_str(out, "null");
        break;
    }
}

/* ---- hashing ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t both[2] = {a, b};
    return lk_hash64(both, sizeof both, 0);
}

uint64_t json_text_hash(const json_t *value)
{
    const char *key;
    size_t key_len, i;
    json_t *item;
    uint64_t kind = (uint64_t)json_typeof(value), sum = 0;
    switch (json_typeof(value)) {
    case JSON_OBJECT: /* a sum is free of order */
        json_object_keylen_foreach((json_t *)value, key, key_len, item)
        {
            sum += mix(lk_hash64(key, key_len, kind), json_text_hash(item));
        }
        return mix(kind, sum);
    case JSON_ARRAY:
        json_array_foreach(value, i, item)
        {
            sum = mix(sum, json_text_hash(item));
        }
        return mix(kind, sum);
    case JSON_STRING:
        return lk_hash64(json_string_value(value), json_string_length(value), kind);
    case JSON_INTEGER:
        return mix(kind, (uint64_t)json_integer_value(value));
    case JSON_REAL: {
        double x = json_real_value(value) + 0.0; /* -0 is 0 */
        return lk_hash64(&x, sizeof x, kind);
    }
    case JSON_TRUE:
    case JSON_FALSE:
    case JSON_NULL:
        return mix(kind, 0);
    }
    return 0;
}
