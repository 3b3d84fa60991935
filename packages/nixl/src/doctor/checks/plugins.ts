import { describePlugins, type PluginDescription, pluginFolder } from "../../backends/plugins.js";
import { rdmaDevices } from "../../backends/rdma-devices.js";
import type { Environment } from "../../environment.js";
import type { Host } from "../../host.js";
import { libraryPackage, wholeWheelHint } from "../../library/library-package.js";
import { nameOfMissing } from "../../library/missing-parts.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

/** Selected backends without a plugin come first. */
export async function pluginChecks(
  libraryPath: string,
  selected: readonly string[],
  host: Host,
  environment: Environment,
): Promise<Check[]> {
  const plugins = await describePlugins({ libraryPath, environment });
  const names = plugins.map(({ name }) => name);
  const hasEfa = rdmaDevices(host).some(({ efa }) => efa);
  return [
    ...selected
      .filter((name) => !names.includes(name))
      .map((name) =>
        finding("plugins", name, name)(
          "fail",
          `selected, but there is no libplugin_${name}.so in ${pluginFolder(libraryPath, environment)}; it contains ${names.join(", ") || "no plugin"}`,
          wholeWheelHint(libraryPath) ??
            "select another backend, or use an installation of NIXL that has it",
        ),
      ),
    ...plugins.map((plugin) =>
      pluginCheck(plugin, {
        selected: selected.includes(plugin.name),
        wanted: hasEfa && plugin.name === "LIBFABRIC",
      }),
    ),
  ];
}

/**
 * A selected plugin must load. Another that lacks a library is a note, or a warning when it is
 * `wanted`; a damaged file is at least a warning.
 */
export function pluginCheck(
  plugin: PluginDescription,
  { selected, wanted }: { selected: boolean; wanted: boolean },
): Check {
  const { name, file, loads, missing, supplied, remedy: fix } = plugin;
  const details = { file, missing: missing.map(nameOfMissing), supplied };
  const check = finding("plugins", name, name, details);
  if (loads) {
    const how =
      supplied.length > 0 ? `, with ${supplied.join(", ")} of ${libraryPackage().name}` : "";
    return check("ok", `loads${how}${selected ? "; selected" : ""}`);
  }
  const serious = selected ? "fail" : "warn";
  const damaged = missing.find((part) => part.kind === "file");
  if (damaged !== undefined)
    return check(serious, `is damaged: ${nameOfMissing(damaged).trim()}`, fix);
  const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
  return selected || wanted ? check(serious, found, fix) : check("note", found);
}
