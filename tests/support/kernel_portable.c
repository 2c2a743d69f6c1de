/* SPDX-License-Identifier: Apache-2.0 */

#define CKF_STATIC
#define CKF_PORTABLE
#include "kernels.h"

int portable_find(const ckf_table *table, ckf_query *query, ckf_matches *out) {
  return ckf_table_find(table, query, out);
}
