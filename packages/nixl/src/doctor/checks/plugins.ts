import type { PluginDescription } from "../../backends/plugins.js";
import { wholeWheelHint } from "../../library/library-package.js";
import { nameOfMissing } from "../../library/missing-parts.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

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
  const check = finding("plugins", name, name);
  if (loads) {
    const how =
      supplied.length > 0 ? `, with ${supplied.join(", ")} from kv-nixl install --with` : "";
    return check("ok", `loads${how}${selected ? "; selected" : ""}`, { details });
  }
  const serious = selected ? "fail" : "warn";
  const damaged = missing.find((part) => part.kind === "file");
  if (damaged !== undefined)
    return check(serious, `is damaged: ${nameOfMissing(damaged).trim()}`, { fix, details });
  const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
  if (!selected && !wanted) return check("note", found, { details });
  return check(serious, found, { fix, details });
}

export function noPluginCheck(
  name: string,
  { libraryPath, folder, found }: { libraryPath: string; folder: string; found: readonly string[] },
): Check {
  return finding("plugins", name, name)(
    "fail",
    `selected, but there is no libplugin_${name}.so in ${folder}; it contains ${found.join(", ") || "no plugin"}`,
    {
      fix:
        wholeWheelHint(libraryPath) ??
        "select another backend, or use an installation of NIXL that has it",
    },
  );
}
