import { readFile } from "node:fs/promises";

/**
 * What the C API of a NIXL can do beyond the functions that every agent needs, by what it exports. The API grew with 1.5.0; a library without one
 * of these serves all of `Transport`.
 */
export interface LibraryFeatures {
  /** Views of prepared memory for kernels on a device. NIXL 1.5.0 and newer. */
  readonly memoryViews: boolean;
  /** A parameter of a backend's own with a single call. NIXL 1.5.0 and newer. */
  readonly customParameters: boolean;
}

const EXPORTED: Readonly<Record<keyof LibraryFeatures, string>> = {
  memoryViews: "nixl_capi_prep_mem_view_local",
  customParameters: "nixl_capi_opt_args_set_custom_param",
};

/** Whether the library exports NIXL's C API, by the function that makes an agent. Rejects when it cannot be read. */
export async function isNixl(libraryPath: string): Promise<boolean> {
  return hasName(await readFile(libraryPath), "nixl_capi_create_configured_agent");
}

/** Reads the names in the file; nothing of it is loaded. Rejects when it cannot be read. */
export async function libraryFeatures(libraryPath: string): Promise<LibraryFeatures> {
  const bytes = await readFile(libraryPath);
  return {
    memoryViews: hasName(bytes, EXPORTED.memoryViews),
    customParameters: hasName(bytes, EXPORTED.customParameters),
  };
}

/** A whole name of the table of strings, between two NULs. */
function hasName(bytes: Buffer, name: string): boolean {
  return bytes.includes(`\0${name}\0`);
}

/** The features that a library lacks, in words. */
export function lackedBy(features: LibraryFeatures): string[] {
  return [
    features.memoryViews ? "" : "memory views",
    features.customParameters ? "" : "custom parameters",
  ].filter((word) => word !== "");
}
