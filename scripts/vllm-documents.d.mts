interface Command {
  readonly text: string;
  readonly isLong: boolean;
  readonly shows: readonly string[];
}
export function rows(): readonly { readonly id: string; readonly commands: readonly Command[] }[];
export function vitestCommands(): readonly (Command & { readonly file: string; readonly name: string })[];
