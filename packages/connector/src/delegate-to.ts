/**
 * Returns an object that delegates to `target`, except for the members in `overrides`. Use it to
 * wrap a scheduler or worker connector: spreading one (`{ ...worker, collectFinished }`) would lose
 * the methods of its class. Throws nothing.
 */
export function delegateTo<Target extends object>(
  target: Target,
  overrides: Partial<Target>,
): Target {
  return new Proxy(target, {
    get(_, key) {
      if (Object.hasOwn(overrides, key)) return Reflect.get(overrides, key) as unknown;
      const value: unknown = Reflect.get(target, key, target);
      return typeof value === "function" ? (value.bind(target) as unknown) : value;
    },
  });
}
