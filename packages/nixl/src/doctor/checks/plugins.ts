import type { PluginDescription } from "../../backends/plugins.js";
import { nameOfMissing } from "../../library/missing-parts.js";
import type { Check } from "../report.js";

/**
 * A plugin as the loader sees it. One that was chosen must load; one that lacks a library of hardware that is not here is worth a note;
 * a damaged file is worth a warning in any case.
 */
export function pluginCheck(
  plugin: PluginDescription,
  { chosen, wanted }: { chosen: boolean; wanted: boolean },
): Check {
  const { name, file, loads, missing, supplied, remedy } = plugin;
  const details = { file, missing: missing.map(nameOfMissing), supplied };
  const check = { id: `plugins.${name}`, area: "plugins", title: name, details } as const;
  if (loads) {
    const how = supplied.length > 0 ? `, with ${supplied.join(", ")} of kv-nixl install --with` : "";
    return { ...check, status: "ok", found: `loads${how}${chosen ? "; chosen" : ""}` };
  }
  const serious = chosen ? "fail" : "warn";
  const fix = remedy === undefined ? {} : { fix: remedy };
  const broken = missing.find((part) => part.kind === "file");
  if (broken !== undefined) {
    return { ...check, status: serious, found: `is damaged: ${nameOfMissing(broken).trim()}`, ...fix };
  }
  const found = `does not load: it lacks ${missing.map(nameOfMissing).join(", ")}`;
  return chosen || wanted
    ? { ...check, status: serious, found, ...fix }
    : { ...check, status: "note", found };
}
