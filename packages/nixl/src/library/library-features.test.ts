import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, test } from "vitest";
import { lackedBy, libraryFeatures } from "./library-features.js";

const folder = scratchFolder();

test.each([
  { names: "", lacked: ["memory views", "custom parameters"] },
  { names: "nixl_capi_prep_mem_view_locals", lacked: ["memory views", "custom parameters"] },
  { names: "nixl_capi_opt_args_set_custom_param", lacked: ["memory views"] },
  { names: "nixl_capi_prep_mem_view_local\0nixl_capi_opt_args_set_custom_param", lacked: [] },
])(
  "lists the features that a library lacks, from its exports: $names",
  async ({ names, lacked }) => {
    const library = join(folder, "libnixl_capi.so");
    await writeFile(library, `\x7fELF\0${names}\0`);
    expect(lackedBy(await libraryFeatures(library))).toEqual(lacked);
  },
);
