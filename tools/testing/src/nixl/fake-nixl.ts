import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";

/** A fake `libnixl_capi.so`, which the addon's build creates; see `native/fake`. */
export const FAKE_NIXL =
  process.env.KV_FAKE_NIXL ??
  fileURLToPath(new URL("../../../../native/build/libfake_nixl_capi.so", import.meta.url));

/** Why tests with the fake cannot run. With CI=true the reason is an error. */
export const fakeMissing: string | undefined = existsSync(FAKE_NIXL)
  ? undefined
  : "run: node native/build.mjs";
if (fakeMissing !== undefined && process.env.CI === "true")
  throw new Error(`${FAKE_NIXL} is missing; ${fakeMissing}`);
