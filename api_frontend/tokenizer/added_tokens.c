#include "api_frontend/tokenizer/added_tokens.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* Children are a linked list: contents are short and few; the root, which every byte of every text
 * meets, is a table. Node 0 is the end of lists. */
typedef struct {
    uint32_t child, sibling;
    int32_t token; /* index into tokens, or -1 */
    uint8_t byte;
} node_t;

struct added_trie {
    node_t *nodes;
    uint32_t n_nodes, cap_nodes;
    added_token_t *tokens;
    uint32_t n_tokens, cap_tokens;
    uint32_t root[256];
};

added_trie_t *added_trie_new(void)
{
    added_trie_t *trie = calloc(1, sizeof *trie);
    if (trie != NULL) {
        trie->n_nodes = 1;
    }
    return trie;
}

void added_trie_destroy(added_trie_t **trie)
{
    if (*trie != NULL) {
        free((*trie)->nodes);
        free((*trie)->tokens);
        free(*trie);
        *trie = NULL;
    }
}

bool added_trie_is_empty(const added_trie_t *trie)
{
    return trie->n_tokens == 0;
}

static uint32_t find_child(const added_trie_t *trie, uint32_t first, uint8_t byte)
{
    uint32_t i = first;
    while (i != 0 && trie->nodes[i].byte != byte) {
        i = trie->nodes[i].sibling;
    }
    return i;
}

static bool reserve(added_trie_t *trie, size_t nodes)
{
    if (trie->n_nodes + nodes > trie->cap_nodes) {
        size_t cap = (trie->n_nodes + nodes) * 2;
        node_t *p = cap < UINT32_MAX ? realloc(trie->nodes, cap * sizeof *p) : NULL;
        if (p == NULL) {
            return false;
        }
        trie->nodes = p;
        trie->cap_nodes = (uint32_t)cap;
    }
    if (trie->n_tokens == trie->cap_tokens) {
        uint32_t cap = trie->cap_tokens == 0 ? 32 : trie->cap_tokens * 2;
        added_token_t *p = realloc(trie->tokens, cap * sizeof *p);
        if (p == NULL) {
            return false;
        }
        trie->tokens = p;
        trie->cap_tokens = cap;
    }
    return true;
}

lk_status_t added_trie_add(added_trie_t *trie, const char *content, size_t len,
                           const added_token_t *token, lk_error_t *err)
{
    if (!reserve(trie, len)) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the added tokens");
    }
    uint32_t at = 0;
    for (size_t i = 0; i < len; i++) {
        uint8_t byte = (uint8_t)content[i];
        uint32_t *list = i == 0 ? &trie->root[byte] : &trie->nodes[at].child;
        uint32_t next = find_child(trie, *list, byte);
        if (next == 0) {
            next = trie->n_nodes++;
            trie->nodes[next] = (node_t){.sibling = *list, .token = -1, .byte = byte};
            *list = next;
        }
        at = next;
    }
    if (trie->nodes[at].token < 0) {
        trie->nodes[at].token = (int32_t)trie->n_tokens++;
    }
    trie->tokens[trie->nodes[at].token] = *token;
    return LK_OK;
}

/* The longest token that begins at text, or NULL; *n is its length. */
static const added_token_t *match_at(const added_trie_t *trie, const char *text, size_t len,
                                     size_t *n)
{
    const added_token_t *found = NULL;
    uint32_t at = trie->root[(uint8_t)text[0]];
    for (size_t i = 1; at != 0; i++) {
        if (trie->nodes[at].token >= 0) {
            found = &trie->tokens[trie->nodes[at].token];
            *n = i;
        }
        at = i < len ? find_child(trie, trie->nodes[at].child, (uint8_t)text[i]) : 0;
    }
    return found;
}

/* Unicode's White_Space. */
static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* A character of words: alphabetic ones (the circled letters too), marks, decimal digits,
 * connectors, joiners. */
static bool is_word(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
               (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
               (c >= 0x1F170 && c <= 0x1F189);
    }
}

static uint32_t char_after(const char *text, size_t len, size_t at, size_t *n)
{
    const uint8_t *p = (const uint8_t *)text + at;
    utf8_look(p, len - at, n);
    return utf8_decode(p, *n);
}

static uint32_t char_before(const char *text, size_t at, size_t *n)
{
    *n = 1;
    while (*n < 4 && ((uint8_t)text[at - *n] & 0xC0) == 0x80) {
        (*n)++;
    }
    return utf8_decode((const uint8_t *)text + at - *n, *n);
}

static bool touches_word(const added_scan_t *scan, size_t start, size_t end)
{
    size_t n;
    return (start > 0 && is_word(char_before(scan->text, start, &n))) ||
           (end < scan->len && is_word(char_after(scan->text, scan->len, end, &n)));
}

static void take_spaces(const added_scan_t *scan, added_piece_t *piece)
{
    size_t n;
    if (piece->token->lstrip) {
        while (piece->start > scan->done && is_space(char_before(scan->text, piece->start, &n))) {
            piece->start -= n;
        }
    }
    if (piece->token->rstrip) {
        while (piece->end < scan->len &&
               is_space(char_after(scan->text, scan->len, piece->end, &n))) {
            piece->end += n;
        }
    }
}

void added_scan_init(added_scan_t *scan, const added_trie_t *trie, const char *text, size_t len,
                     bool with_special)
{
    *scan = (added_scan_t){.trie = trie, .text = text, .len = len, .with_special = with_special};
}

bool added_scan_next(added_scan_t *scan, added_piece_t *piece)
{
    if (scan->has_pending) {
        *piece = scan->pending;
        scan->has_pending = false;
        return true;
    }
    while (!added_trie_is_empty(scan->trie) && scan->scan < scan->len) {
        size_t at = scan->scan, n;
        const added_token_t *token = match_at(scan->trie, scan->text + at, scan->len - at, &n);
        if (token == NULL) {
            scan->scan++;
            continue;
        }
        scan->scan = at + n;
        if ((token->special && !scan->with_special) ||
            (token->single_word && touches_word(scan, at, at + n))) {
            continue;
        }
        added_piece_t found = {.token = token, .start = at, .end = at + n};
        take_spaces(scan, &found);
        size_t plain = scan->done;
        scan->done = LK_MAX(scan->done, found.end);
        if (plain < found.start) {
            *piece = (added_piece_t){.start = plain, .end = found.start};
            scan->pending = found;
            scan->has_pending = true;
        } else {
            *piece = found;
        }
        return true;
    }
    if (scan->done < scan->len) {
        *piece = (added_piece_t){.start = scan->done, .end = scan->len};
        scan->done = scan->len;
        return true;
    }
    return false;
}
