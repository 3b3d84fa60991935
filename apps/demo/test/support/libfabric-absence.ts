import { describePlugins, findLibrary } from "@kv/nixl";
import { nixlAbsence } from "./nixl-absence.js";

/** Why the LIBFABRIC backend of NIXL is not available here; undefined when it is. */
export async function libfabricAbsence(): Promise<string | undefined> {
  const absence = await nixlAbsence();
  if (absence !== undefined) return absence;
  const [plugin] = await describePlugins({
    libraryPath: await findLibrary(),
    names: ["LIBFABRIC"],
  });
  return plugin?.loads === true ? undefined : (plugin?.remedy ?? "NIXL has no LIBFABRIC plugin");
}
