// Finds sections: by the words of the query, or by phrases that mean the same, as whole words.
"use strict";
{
  const { entries, same, taught } = window.SECTIONS;
  const stem = (word) =>
    word.length > 4 ? word.replace(/ies$/, "y").replace(/(?<=[^s])s$/, "").replace(/(?<=...)(ing|ed)$/, "").replace(/(?<=...[st])ion$/, "").replace(/e$/, "") : word.replace(/(?<=..[^s])s$/, "");
  // "all-reduce" is a word, and so are its parts.
  const wordsOf = (text) => (text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []).map(stem);
  const plain = (text) => ` ${wordsOf(text).join(" ")} `;
  // Words of a question that say nothing of its subject.
  const common = new Set(wordsOf(`a about after all an and any are as at be been before between but by can could did difference do does enough even for from get gets
    getting give go good got had has have help how i if in instead into is it its just like make makes many me mean means more most much my
    need needs no normal not of on one only or other our out over please problem question same should significantly so some still than that
    the their them then there these they this to too try trying understand up use used using versus very vs want was we were what when where
    which while who why will with work works would you your`));
  // Pages that name much and explain little, and exercises, come after the pages that explain.
  const weightOf = (address) => (/^book\/(path|index|teaching|project|references)/.test(address) ? 0.4 : /^book\/(questions|gpt3)_/.test(address) ? 0.6 : 1);

  const index = entries.map(([page, title, address, prose]) => {
    const names = [title, ...(taught[address] ?? [])];
    return {
      page, title, address, prose, names: [title.split(":")[0], ...names].map(plain),
      inTitle: plain(names.join(" ")), inPage: plain(page), inProse: plain(prose ?? ""), weight: prose === null ? 0.001 : weightOf(address),
    };
  });
  const usual = entries.reduce((sum, [, , , prose]) => sum + (prose ?? "").length, 0) / entries.filter(([, , , prose]) => prose).length;
  const times = (text, piece) => text.split(piece).length - 1;

  // How much of an entry is about a phrase, from 0 to 1: its title counts most, and a long section has more words by chance.
  const fit = (entry, phrase) => {
    const inProse = times(entry.inProse, phrase) / (0.5 + (0.5 * (entry.prose ?? "").length) / usual);
    const found = 12 * times(entry.inTitle, phrase) + 4 * times(entry.inPage, phrase) + inProse;
    return found / (found + 12);
  };
  const rarity = (phrase) => Math.log(1 + index.length / (1 + index.filter(({ inTitle, inProse }) => (inTitle + inProse).includes(phrase)).length));

  // What is asked for: each a phrase, and others that mean the same.
  const groups = same.map((group) => group.map(plain));
  const longest = groups.flat().sort((a, b) => b.length - a.length);
  const conceptsOf = (query) => {
    let rest = plain(query);
    const concepts = [];
    for (const own of longest) {
      if (!rest.includes(own)) continue;
      rest = rest.replaceAll(own, " | ");
      concepts.push([own, ...groups.filter((group) => group.includes(own)).flat().filter((other) => other !== own)]);
    }
    const words = [...new Set(rest.match(/[^ |]+/g))];
    const rare = words.filter((word) => !common.has(word) && !/^\d+$/.test(word));
    return [...concepts, ...(concepts.length || rare.length ? rare : words).map((word) => [` ${word} `])];
  };

  const search = (query) => {
    const concepts = conceptsOf(query).map((phrases) => ({ phrases, rarity: rarity(phrases[0]) }));
    const total = concepts.reduce((sum, { rarity }) => sum + rarity, 0);
    const asked = [plain(query), plain(wordsOf(query).filter((word) => !common.has(word)).join(" "))];
    const found = [];
    for (const entry of index) {
      let score = 0, covered = 0;
      for (const { phrases, rarity } of concepts) {
        const best = Math.max(...phrases.map((phrase, at) => (at ? 0.7 : 1) * fit(entry, phrase)));
        score += rarity * best;
        if (best) covered += rarity;
      }
      if (!score) continue;
      score *= (covered / total) * entry.weight * (asked.some((words) => entry.names.includes(words)) ? 4 : 1);
      found.push({ entry, score, words: concepts.flatMap(({ phrases }) => phrases) });
    }
    return found.sort((a, b) => b.score - a.score);
  };

  const add = (parent, tag, text, more) => parent.appendChild(Object.assign(document.createElement(tag), { textContent: text, ...more }));
  const show = ({ entry, words }, list) => {
    const item = add(list, "li", "");
    add(item, "a", entry.title, { href: entry.address });
    add(item, "span", entry.prose === null ? ` in ${entry.page}` : entry.page === entry.title ? "" : ` — ${entry.page}`, { className: "search-page" });
    const pieces = entry.prose?.split(/(?<=[.:;?!])\s+/) ?? [];
    const sentence = pieces.find((piece) => words.some((phrase) => plain(piece).includes(phrase))) ?? pieces[0];
    if (sentence) add(item, "p", sentence.length > 220 ? sentence.slice(0, 220) + "…" : sentence);
  };

  const query = new URLSearchParams(location.search).get("q")?.trim() ?? "";
  const found = query ? search(query).slice(0, 40) : [];
  for (const box of document.querySelectorAll("input[name=q]")) box.value = query;
  for (const one of found) show(one, document.querySelector("#search-results"));
  if (query) {
    document.querySelector(".search-summary").textContent = found.length
      ? `${found.length === 40 ? "The best 40" : found.length} sections for “${query}”.`
      : `Nothing has “${query}” in it. Fewer words, or another word for it, may find something.`;
  }
}
