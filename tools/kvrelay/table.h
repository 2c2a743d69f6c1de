/* SPDX-License-Identifier: Apache-2.0 */
/* table.h - columns for people: collects rows, then prints them aligned. */
#ifndef KVRELAY_TABLE_H
#define KVRELAY_TABLE_H

#include <stdbool.h>
#include <stdio.h>

#define TABLE_COLUMNS 10

typedef struct table {
  int columns;
  int rows, cap;
  char **cells; /* rows * columns texts; NULL cells after a failed allocation print as "-" */
} table;

/* `header` has `columns` names, at most TABLE_COLUMNS. */
void table_init(table *t, int columns, const char *const *header);
/* Starts a row; its cells are "-" until table_cell sets them. */
void table_row(table *t);
void table_cell(table *t, int column, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Prints and frees. */
void table_print(table *t, FILE *out);

#endif
