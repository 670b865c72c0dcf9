// For bindings alone: the release whose headers a file was compiled with, as text
// in the compiled file. zero_compiler/engine_build.py reads it before the file is
// loaded.
#pragma once

#include <torch/headeronly/version.h>

[[gnu::used]] static const char compiled_for[] =
    "zero_compiler engine compiled for torch " TORCH_VERSION;
