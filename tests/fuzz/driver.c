/* SPDX-License-Identifier: Apache-2.0 */

/*
 * fuzz_<entry>                runs the bytes of stdin
 * fuzz_<entry> PATH…          runs files, and every file of folders; one line "ok - NAME" for each
 *
 * Each input runs in a buffer of its own length. A folder without files is an error: a corpus that
 * was lost must not look like one that passed. What an input breaks ends the program; the last line
 * "run: NAME" says which one it was.
 */

#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

enum { INPUT_CAP = 1 << 20 };

static void run_stream(FILE *from) {
  uint8_t *buffer = fuzz_alloc(INPUT_CAP);
  const size_t len = fread(buffer, 1, INPUT_CAP, from);
  uint8_t *input = fuzz_copy(buffer, len);
  free(buffer);
  (void)LLVMFuzzerTestOneInput(input, len);
  free(input);
}

static bool run_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    printf("not ok - %s: cannot be read\n", path);
    return false;
  }
  printf("run: %s\n", path);
  fflush(stdout);
  run_stream(file);
  fclose(file);
  printf("ok - %s\n", path);
  return true;
}

static bool run_folder(const char *path) {
  struct dirent **entries;
  const int count = scandir(path, &entries, NULL, alphasort);
  size_t files = 0;
  bool good = count >= 0;
  for (int i = 0; i < count; i++) {
    char name[1024];
    snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
    if (entries[i]->d_name[0] != '.') {
      files++;
      good &= run_file(name);
    }
    free(entries[i]);
  }
  if (count >= 0)
    free((void *)entries);
  if (files == 0)
    printf("not ok - %s: no inputs\n", path);
  return good && files > 0;
}

int main(int argc, char **argv) {
  bool good = true;
  if (argc == 1)
    run_stream(stdin);
  for (int i = 1; i < argc; i++) {
    struct stat about;
    if (stat(argv[i], &about) == 0 && S_ISDIR(about.st_mode))
      good &= run_folder(argv[i]);
    else
      good &= run_file(argv[i]);
  }
  return good ? 0 : 1;
}
