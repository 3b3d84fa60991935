import { describePlugins, findLibrary } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";

/** Why tests with one of NIXL's plugins cannot run; undefined when they can. */
export async function pluginMissing(name: string): Promise<string | undefined> {
  if (nixlMissing !== undefined) return nixlMissing;
  const [plugin] = await describePlugins({ libraryPath: await findLibrary(), names: [name] });
  if (plugin?.loads === true) return undefined;
  return plugin?.remedy ?? `NIXL has no ${name} plugin`;
}
