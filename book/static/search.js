// Finds sections: every word of the query, or of a phrase that means the same, as whole words.
"use strict";
{
  const { entries, same, taught } = window.SECTIONS;
  const stem = (word) =>
    word.length > 4 ? word.replace(/ies$/, "y").replace(/(?<=[^s])s$/, "").replace(/(?<=...)(ing|ed)$/, "").replace(/e$/, "") : word.replace(/(?<=..[^s])s$/, "");
  // "all-reduce" is a word, and so are its parts.
  const wordsOf = (text) => (text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []).map(stem);
  const plain = (text) => ` ${wordsOf(text).join(" ")} `;

  const index = entries.map(([page, title, address, prose]) => ({
    page, title, address, prose,
    inTitle: plain(title), inPage: plain(page), inProse: plain(prose ?? ""),
    name: plain(title.split(":")[0]), weight: prose === null ? 0.001 : address.includes("questions_") ? 0.6 : 1,
  }));
  const common = new Set(wordsOf("a an and are as at be by do does how i if in is it many my of on or the to what when which why with"));
  const times = (text, piece) => text.split(piece).length - 1;

  // How well an entry fits some words: rare ones and titles count more. Where one is missing: 0, or
  // with `some` as much as the others are worth.
  const fit = (entry, words, rarity, some) => {
    let sum = 0;
    for (const word of words) {
      const piece = ` ${word} `;
      const found = 8 * times(entry.inTitle, piece) + 3 * times(entry.inPage, piece) + Math.min(4, times(entry.inProse, piece));
      if (!found && !some) return 0;
      sum += found * rarity.get(word);
    }
    const phrase = ` ${words.join(" ")} `;
    if (words.length > 1) sum *= 1 + 2 * entry.inTitle.includes(phrase) + entry.inProse.includes(phrase);
    if (entry.name === phrase) sum *= 4;
    return sum * entry.weight;
  };

  const search = (query, some = false) => {
    const asked = plain(query);
    const phrases = [[query, 1]];
    for (const group of same) {
      const said = group.filter((phrase) => asked.includes(plain(phrase)));
      const own = said.sort((a, b) => b.length - a.length)[0];
      for (const other of own ? group : []) {
        phrases.push([asked.replace(plain(own), plain(other)), 0.6]);
      }
    }
    const best = new Map();
    for (const [phrase, weight] of phrases) {
      const all = [...new Set(wordsOf(phrase))];
      const words = all.some((word) => !common.has(word)) ? all.filter((word) => !common.has(word)) : all;
      const rarity = new Map(words.map((word) => {
        const holding = index.filter((e) => e.inProse.includes(` ${word} `)).length;
        return [word, Math.log(1 + index.length / (1 + holding))];
      }));
      for (const entry of words.length ? index : []) {
        const score = weight * fit(entry, words, rarity, some);
        if (score > (best.get(entry)?.score ?? 0)) best.set(entry, { entry, score, words });
      }
    }
    if (!best.size && !some) return search(query, true);
    return [...best.values()].sort((a, b) => b.score - a.score);
  };

  const add = (parent, tag, text, more) => parent.appendChild(Object.assign(document.createElement(tag), { textContent: text, ...more }));
  const show = ({ entry, words }, list) => {
    const item = add(list, "li", "");
    add(item, "a", entry.title, { href: entry.address });
    add(item, "span", entry.prose === null ? ` in ${entry.page}` : entry.page === entry.title ? "" : ` — ${entry.page}`, { className: "search-page" });
    const pieces = entry.prose?.split(/(?<=[.:;?!])\s+/) ?? [];
    const sentence = pieces.find((piece) => words.some((word) => plain(piece).includes(` ${word} `))) ?? pieces[0];
    if (sentence) add(item, "p", sentence.length > 220 ? sentence.slice(0, 220) + "…" : sentence);
  };

  // The sections that a phrase leads to which is all of the query.
  const first = (query) => Object.entries(taught)
    .filter(([, phrases]) => phrases.some((phrase) => plain(phrase) === plain(query)))
    .map(([address]) => ({ entry: index.find((e) => e.address === address), words: wordsOf(query) }));

  const query = new URLSearchParams(location.search).get("q")?.trim() ?? "";
  const led = first(query);
  const others = query ? search(query).filter((one) => !led.some(({ entry }) => entry === one.entry)) : [];
  const found = [...led, ...others].slice(0, 40);
  for (const box of document.querySelectorAll("input[name=q]")) box.value = query;
  for (const one of found) show(one, document.querySelector("#search-results"));
  if (query) {
    document.querySelector(".search-summary").textContent = found.length
      ? `${found.length === 40 ? "The best 40" : found.length} sections for “${query}”.`
      : `Nothing has “${query}” in it. Fewer words, or another word for it, may find something.`;
  }
}
