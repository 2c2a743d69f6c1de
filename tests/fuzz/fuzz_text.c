/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvrelay.h: names, paths and texts of peers, against rules written out once more.
 *
 * SECURITY.md: 1, 2, 4, 10.
 *
 * Input: the text.
 */

#include "fuzz.h"
#include "kvrelay.h"

/* Number of bytes of the scalar value at the front, 0 when there is none. */
static size_t scalar(const uint8_t *at, size_t left, uint32_t *code) {
  const size_t len = at[0] < 0x80       ? 1
                     : at[0] >> 5 == 6  ? 2
                     : at[0] >> 4 == 14 ? 3
                     : at[0] >> 3 == 30 ? 4
                                        : 0;
  static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (len == 0 || len > left)
    return 0;
  *code = len == 1 ? at[0] : at[0] & (0x7Fu >> len);
  for (size_t i = 1; i < len; i++) {
    if (at[i] >> 6 != 2)
      return 0;
    *code = *code << 6 | (at[i] & 0x3Fu);
  }
  return *code < smallest[len] || *code > 0x10FFFF || *code >> 11 == 0x1B ? 0 : len;
}

static bool white(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
  uint8_t *text = fuzz_copy(data, len);
  const kvrelay_text as_text = {text, len};
  bool utf8 = true, control = false, outer = false;
  for (size_t at = 0; at < len && utf8;) {
    uint32_t code = 0;
    const size_t step = scalar(text + at, len - at, &code);
    utf8 = step > 0;
    control |= code < 0x20 || (code >= 0x7F && code < 0xA0);
    outer |= white(code) && (at == 0 || at + step == len);
    at += step;
  }
  FUZZ_CHECK(kvrelay_utf8_valid(text, len) == utf8);
  FUZZ_CHECK(kvrelay_text_valid(as_text) == (utf8 && len > 0 && !outer));
  FUZZ_CHECK(kvrelay_subscriber_id_valid(as_text) == (utf8 && len > 0 && len <= 128 && !control));

  uint64_t dc = 0xD, same = 0xD;
  const int rc = kvrelay_dc_id(as_text, &dc);
  FUZZ_CHECK(rc == KVRELAY_OK || (rc == KVRELAY_ERR_ARG && dc == 0xD));
  FUZZ_CHECK(kvrelay_dc_id(as_text, &same) == rc && same == dc);
  FUZZ_CHECK((len == 0 || (utf8 && outer)) ? rc == KVRELAY_ERR_ARG : true);

  const int32_t reason = kvrelay_reason_from_name(text, len);
  const char *name = kvrelay_reason_name(reason);
  FUZZ_CHECK(!name || reason == KVRELAY_REASON_NONE ||
             (strlen(name) == len && memcmp(name, text, len) == 0));
  const int32_t method = kvrelay_method_from_path(text, len);
  const char *path = kvrelay_method_path(method);
  FUZZ_CHECK((path != NULL) == (method != KVRELAY_METHOD_NONE));
  FUZZ_CHECK(!path || (strlen(path) == len && memcmp(path, text, len) == 0));
  free(text);
  return 0;
}
