import { describePlugins, findLibrary } from "@kv/nixl";
import { nixlMissing } from "./require-nixl.js";

/** Why tests over LIBFABRIC cannot run here; undefined when they can. */
export const libfabricMissing: string | undefined = nixlMissing ?? (await reason());

async function reason(): Promise<string | undefined> {
  const libraryPath = await findLibrary();
  const [plugin] = await describePlugins({ libraryPath, names: ["LIBFABRIC"] });
  return plugin?.loads === true ? undefined : (plugin?.remedy ?? "NIXL has no LIBFABRIC plugin");
}
