import { existsSync } from "node:fs";
import { join } from "node:path";

/** A fake `libnixl_capi.so`, which the addon's build creates; see `native/fake`. */
export const FAKE_NIXL =
  process.env.KV_FAKE_NIXL ??
  join(import.meta.dirname, "../../../../native/build/libfake_nixl_capi.so");

export const fakeMissing = unbuilt(FAKE_NIXL);

/** Why tests with a file of the addon's build cannot run. With CI=true the reason is an error. */
export function unbuilt(file: string): string | undefined {
  if (existsSync(file)) return undefined;
  if (process.env.CI === "true") throw new Error(`${file} is missing; run: node native/build.mjs`);
  return "run: node native/build.mjs";
}
