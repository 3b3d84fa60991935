// The arguments of npm run demo, read without dependencies: --help and a wrong flag are answered
// before the set-up. apps/demo/src/command-line.ts builds the program from the same options.json.
import { readFileSync } from "node:fs";

const COMMANDS = JSON.parse(
  readFileSync(new URL("../../apps/demo/src/options.json", import.meta.url), "utf8"),
);

/** `help` is for stdout, `error` for stderr; neither: the table allows the arguments. */
export function checkArguments(args) {
  if (args[0] === "help") return checkArguments([...args.slice(1), "--help"]);
  const isCommand = args[0] !== "demo" && Object.hasOwn(COMMANDS, args[0] ?? "");
  const name = isCommand ? args[0] : "demo";
  const { options } = COMMANDS[name];
  const rest = isCommand ? args.slice(1) : args;
  for (let i = 0; i < rest.length; i++) {
    const argument = rest[i];
    if (argument === "--help" || argument === "-h") return { help: helpOf(name) };
    const [, flag = argument, inline] = /^(--[^=]+)=(.*)$/s.exec(argument) ?? [];
    const option = options.find(({ flags }) => flags.split(" ")[0] === flag);
    if (option === undefined) {
      const what = argument.startsWith("-")
        ? `unknown option '${flag}'`
        : `unknown command or argument '${argument}'`;
      return {
        error: `${what}; npm run demo -- ${isCommand ? `${name} ` : ""}--help lists what there is`,
      };
    }
    const [, wanted] = option.flags.split(" ");
    if (wanted === undefined) continue;
    const values = inline === undefined ? [rest[++i]] : [inline];
    if (values[0] === undefined) return { error: `option '${option.flags}' argument missing` };
    while (wanted.endsWith("...>") && rest[i + 1] !== undefined && !rest[i + 1].startsWith("-"))
      values.push(rest[++i]);
    for (const value of values) {
      const why = refusal(option, value);
      if (why !== undefined)
        return { error: `option '${option.flags}' argument '${value}' is invalid. ${why}` };
    }
  }
  return {};
}

function refusal({ choices, range, anyCase }, value) {
  if (choices !== undefined && !choices.includes(anyCase ? value.toUpperCase() : value))
    return `Allowed choices are ${choices.join(", ")}.`;
  if (range === undefined) return undefined;
  const [least, most] = range;
  const isValid = /^[0-9]+$/.test(value) && Number(value) >= least && Number(value) <= most;
  return isValid ? undefined : `It must be a whole number from ${least} to ${most}.`;
}

function helpOf(name) {
  const { description, options } = COMMANDS[name];
  const width = Math.max(...options.map(({ flags }) => flags.length));
  const lines = options.map(({ flags, description: text, choices, default: usual }) => {
    const notes = [
      choices && `choices: ${choices.join(", ")}`,
      usual && `default: ${usual}`,
    ].filter(Boolean);
    return `  ${flags.padEnd(width)}  ${text}${notes.length === 0 ? "" : ` (${notes.join("; ")})`}`;
  });
  const commands = Object.entries(COMMANDS).filter(([command]) => command !== "demo");
  const others = commands.map(
    ([command, { description: text }]) => `  ${command.padEnd(width)}  ${text}`,
  );
  return [
    `Usage: npm run demo -- ${name === "demo" ? "[options] | COMMAND [options]" : `${name} [options]`}`,
    "",
    description,
    "",
    "Options:",
    ...lines,
    ...(name === "demo" ? ["", "Commands:", ...others] : []),
    "",
  ].join("\n");
}

/** By the precedence of `@kv/nixl`: options, `NIXL_BACKEND`, `VLLM_NIXL_BACKEND`. */
export function usesLibfabric(args, env) {
  const text = args.join(" ");
  if (/--transport[ =]memory/.test(text)) return false;
  const named =
    /--backend[ =](\S+)/.exec(text)?.[1] ?? /"backends"\s*:\s*(\[[^\]]*\])/.exec(text)?.[1];
  const variable = [env.NIXL_BACKEND, env.VLLM_NIXL_BACKEND].find(
    (value) => (value ?? "").trim() !== "",
  );
  return /libfabric/i.test(named ?? variable ?? "");
}
