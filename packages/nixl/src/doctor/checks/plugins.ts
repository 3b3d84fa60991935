import type { PluginDescription } from "../../backends/plugins.js";
import { wholeWheelHint } from "../../library/library-package.js";
import { nameOfMissing } from "../../library/missing-parts.js";
import type { Check } from "../report.js";

/**
 * Judges a plugin. A selected one must load. One that lacks a library is a note when its hardware
 * is not here, a warning when it is `wanted`. A damaged file is at least a warning.
 */
export function pluginCheck(
  plugin: PluginDescription,
  { selected, wanted }: { selected: boolean; wanted: boolean },
): Check {
  const { name, file, loads, missing, supplied, remedy: fix } = plugin;
  const details = { file, missing: missing.map(nameOfMissing), supplied };
  const check = { id: `plugins.${name}`, area: "plugins", title: name, details } as const;
  if (loads) {
    const how =
      supplied.length > 0 ? `, with ${supplied.join(", ")} from kv-nixl install --with` : "";
    return { ...check, status: "ok", found: `loads${how}${selected ? "; selected" : ""}` };
  }
  const serious = selected ? "fail" : "warn";
  const damaged = missing.find((part) => part.kind === "file");
  if (damaged !== undefined) {
    return {
      ...check,
      status: serious,
      found: `is damaged: ${nameOfMissing(damaged).trim()}`,
      fix,
    };
  }
  const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
  if (!selected && !wanted) return { ...check, status: "note", found };
  return { ...check, status: serious, found, fix };
}

/** A selected backend for which NIXL has no plugin. */
export function noPluginCheck(
  name: string,
  { libraryPath, folder, found }: { libraryPath: string; folder: string; found: readonly string[] },
): Check {
  return {
    id: `plugins.${name}`,
    area: "plugins",
    title: name,
    status: "fail",
    found: `selected, but there is no libplugin_${name}.so in ${folder}; it contains ${found.join(", ") || "no plugin"}`,
    fix:
      wholeWheelHint(libraryPath) ??
      "select another backend, or use an installation of NIXL that has it",
  };
}
