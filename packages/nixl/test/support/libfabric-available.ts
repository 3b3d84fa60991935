import { describePlugins, findLibrary } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";

/**
 * Why tests over LIBFABRIC cannot run on this machine; undefined when they can. With CI=true the
 * reason is an error instead of a skipped suite.
 */
export const libfabricMissing: string | undefined = nixlMissing ?? (await reason());

async function reason(): Promise<string | undefined> {
  const libraryPath = await findLibrary();
  const [plugin] = await describePlugins({ libraryPath, names: ["LIBFABRIC"] });
  if (plugin?.loads === true) return undefined;
  const why = plugin?.remedy ?? "NIXL has no LIBFABRIC plugin";
  if (process.env.CI === "true") throw new Error(`LIBFABRIC does not load: ${why}`);
  return why;
}
