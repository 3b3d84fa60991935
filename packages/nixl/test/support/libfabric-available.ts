import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { pluginMissing } from "./plugins.js";

/**
 * Why tests over LIBFABRIC cannot run on this machine; undefined when they can. With CI=true the
 * reason is an error instead of a skipped suite.
 */
export const libfabricMissing = await pluginMissing("LIBFABRIC");

if (process.env.CI === "true" && libfabricMissing !== nixlMissing)
  throw new Error(`LIBFABRIC does not load: ${libfabricMissing}`);
