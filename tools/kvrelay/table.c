/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "show.h"

void table_init(table *t, int columns, const char *const *header) {
  memset(t, 0, sizeof *t);
  t->columns = columns;
  table_row(t);
  for (int i = 0; i < columns; i++)
    table_cell(t, i, "%s", header[i]);
}

void table_row(table *t) {
  if (t->rows == t->cap) {
    int cap = t->cap == 0 ? 16 : 2 * t->cap;
    char **cells = realloc(t->cells, (size_t)(cap * t->columns) * sizeof *cells);
    if (cells == NULL)
      return;
    memset(cells + t->cap * t->columns, 0, (size_t)((cap - t->cap) * t->columns) * sizeof *cells);
    t->cells = cells;
    t->cap = cap;
  }
  t->rows++;
}

void table_cell(table *t, int column, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  show_vformat(text, sizeof text, format, args);
  va_end(args);
  if (t->rows == 0)
    return;
  char **cell = &t->cells[(t->rows - 1) * t->columns + column];
  free(*cell);
  *cell = strdup(text);
}

static const char *cell_text(const table *t, int row, int column) {
  const char *text = t->cells[row * t->columns + column];
  return text == NULL || text[0] == 0 ? "-" : text;
}

/* Bytes that start a character: texts may hold UTF-8. */
static int width_of(const char *text) {
  int n = 0;
  for (; *text != 0; text++)
    n += ((unsigned char)*text & 0xC0) != 0x80;
  return n;
}

void table_print(table *t, FILE *out) {
  int width[TABLE_COLUMNS] = {0};
  for (int row = 0; row < t->rows; row++)
    for (int column = 0; column < t->columns; column++) {
      int n = width_of(cell_text(t, row, column));
      if (n > width[column])
        width[column] = n;
    }
  for (int row = 0; row < t->rows; row++)
    for (int column = 0; column < t->columns; column++) {
      const char *text = cell_text(t, row, column);
      bool last = column + 1 == t->columns;
      fprintf(out, "%s%*s%s", text, last ? 0 : width[column] - width_of(text), "",
              last ? "\n" : "  ");
    }
  for (int i = 0; i < t->rows * t->columns; i++)
    free(t->cells[i]);
  free(t->cells);
}
