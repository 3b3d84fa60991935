import { describePlugins, findLibrary } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";

const [plugin] =
  nixlMissing === undefined
    ? await describePlugins({ libraryPath: await findLibrary(), names: ["OBJ"] })
    : [];

/** Why tests with NIXL's plugin for object stores cannot run; undefined when they can. */
export const objMissing: string | undefined =
  plugin?.loads === true ? undefined : "NIXL's OBJ plugin does not load";
