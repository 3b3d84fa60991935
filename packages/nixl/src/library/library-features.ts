import { readFile } from "node:fs/promises";

/**
 * Optional functions of NIXL's C API that a library exports. They came with NIXL 1.5.0; `Transport`
 * needs none of them.
 */
export interface LibraryFeatures {
  /** Prepared memory for kernels on a device (NIXL 1.5.0 and newer). */
  readonly memoryViews: boolean;
  /** A backend's own parameters for a single call (NIXL 1.5.0 and newer). */
  readonly customParameters: boolean;
}

const EXPORTED: Readonly<Record<keyof LibraryFeatures, string>> = {
  memoryViews: "nixl_capi_prep_mem_view_local",
  customParameters: "nixl_capi_opt_args_set_custom_param",
};

/** Rejects when the file cannot be read. */
export async function isNixl(libraryPath: string): Promise<boolean> {
  return hasName(await readFile(libraryPath), "nixl_capi_create_configured_agent");
}

/** Reads the file's exported symbols without loading it. Rejects when the file cannot be read. */
export async function libraryFeatures(libraryPath: string): Promise<LibraryFeatures> {
  const bytes = await readFile(libraryPath);
  return {
    memoryViews: hasName(bytes, EXPORTED.memoryViews),
    customParameters: hasName(bytes, EXPORTED.customParameters),
  };
}

/** Names in the file's string table end with a NUL. */
function hasName(bytes: Buffer, name: string): boolean {
  return bytes.includes(`\0${name}\0`);
}

/** The names of the features that a library lacks, such as "memory views". */
export function lackedBy(features: LibraryFeatures): string[] {
  return [
    features.memoryViews ? "" : "memory views",
    features.customParameters ? "" : "custom parameters",
  ].filter((word) => word !== "");
}
