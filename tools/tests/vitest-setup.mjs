// Before the suites: tests of programs start what is built, so the build must be that of the
// sources. Tasks of turbo depend on it.
import { bundles } from "../setup/setup.mjs";

export async function setup() {
  if (process.env.TURBO_HASH === undefined) await bundles();
}
